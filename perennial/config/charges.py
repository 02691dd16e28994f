"""What each release of a site is charged as: one function for each kind of release.

The site's ledger and the server's record of what it asked both call it.

run, experiment: identifiers of the run and of the experiment (`Experiment.digest`).
"""

import math
from dataclasses import replace
from typing import Any

from perennial.config.experiment import Experiment
from perennial.config.learner import LearnerConfig
from perennial.privacy.calibration import gaussian_multiplier
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import DigestGuarantee, digest_entries
from perennial.privacy.entries import RECIPIENT, Entry


def steps_of_round(learner: LearnerConfig, privacy: PrivacyConfig) -> int:
    """DP-SGD steps in one round, ceil(epochs / sample_rate): from public settings alone.

    In that many steps each sample is drawn `epochs` times on average. privacy.sample_rate must be set.
    """
    assert privacy.sample_rate is not None
    return math.ceil(learner.epochs / privacy.sample_rate)


def update(experiment: Experiment, run: str) -> Entry:
    """The ledger entry for releasing one round's model update."""
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


def class_means(experiment: Experiment, run: str) -> Entry:
    """The ledger entry for the sums of the class means, which have the noise of one update."""
    entry = Entry.of_update(experiment.privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT)
    return replace(entry, kind="class_means")


def sums(experiment: Experiment, run: str, task: int) -> Entry:
    """The ledger entry for one task's sums of features, computed from that task's samples alone."""
    privacy = experiment.privacy
    if not privacy.enabled:
        return in_the_clear(experiment, run, "statistics")
    return Entry.of_sums(privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT, task=task)


def sparsity(experiment: Experiment, run: str, epsilon: float | None, delta: float | None) -> Entry:
    """The ledger entry for one sparsity vector.

    epsilon, delta: guarantee of its noise for one sample replaced; None: it has no noise.
    """
    place = _place(experiment, run, "sparsity", unit="sample")
    if epsilon is None or delta is None:
        return Entry(**place, mechanism="unprotected")
    return Entry(
        **place,
        mechanism="gaussian",
        noise_multiplier=gaussian_multiplier(epsilon, delta),
        sample_rate=1.0,
        steps=1,
        seeded=experiment.privacy.noise_source == "seeded",
    )


def digests(
    experiment: Experiment, run: str, config: DigestConfig, guarantee: DigestGuarantee
) -> list[Entry]:
    """The ledger entries for one task's digests: for the features, and for the labels if they have noise."""
    return digest_entries(config, guarantee, run, experiment.digest, RECIPIENT)


def evaluation(experiment: Experiment, run: str) -> Entry:
    """The ledger entry for one release of right answers on held-out samples, noised or not."""
    multiplier = experiment.evaluation.noise_multiplier
    if multiplier is None:
        return in_the_clear(experiment, run, "evaluation")
    privacy = experiment.privacy.model_copy(update={"noise_multiplier": multiplier})
    entry = Entry.of_update(privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT)
    return replace(entry, kind="evaluation")


def in_the_clear(experiment: Experiment, run: str, kind: str) -> Entry:
    """The ledger entry for figures without noise. kind: of release, such as metrics or evaluation."""
    return Entry(**_place(experiment, run, kind, unit="site"), mechanism="unprotected")


def _place(experiment: Experiment, run: str, kind: str, unit: str) -> dict[str, Any]:
    return {
        "run": run,
        "experiment": experiment.digest,
        "recipient": RECIPIENT,
        "kind": kind,
        "unit": unit,
        "relation": "replace",
    }
