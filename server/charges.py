"""What a site charges to its ledger for each thing that the server asks of it, as the server can know it."""

from dataclasses import replace

from client.private_training import steps_of_round
from client.release import RECIPIENT
from config.experiment import Experiment
from privacy.entries import Entry


def update_entry(experiment: Experiment, run: str) -> Entry:
    """One round's update."""
    privacy = experiment.privacy
    sampled = privacy.sample_rate is not None
    return Entry.of_update(
        privacy,
        run=run,
        experiment=experiment.digest,
        recipient=RECIPIENT,
        sample_rate=privacy.sample_rate or 1.0,
        steps=steps_of_round(experiment.learner, privacy) if sampled else 1,
    )


def class_means_entry(experiment: Experiment, run: str) -> Entry:
    """Sums for the class means, which leave with the noise of an update."""
    entry = Entry.of_update(experiment.privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT)
    return replace(entry, kind="class_means")
