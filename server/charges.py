"""What a site charges for its sums for the class means, as the server can know it."""

from dataclasses import replace

from perennial.config.experiment import Experiment
from perennial.privacy.entries import RECIPIENT, Entry


def class_means_entry(experiment: Experiment, run: str) -> Entry:
    """Sums for the class means, which leave with the noise of an update."""
    entry = Entry.of_update(experiment.privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT)
    return replace(entry, kind="class_means")
