"""Each release of a site: by which mechanism a unit is hidden in it, and so what it costs.

The site sizes its noise by these mechanisms and pays their entries (client/release.py). Review, the server's
record of what it asked and `perennial epsilon` call the same functions.

run, experiment: identifiers of the run and of the experiment (`Experiment.digest`).
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perennial.config.evaluation import count_noise
from perennial.config.experiment import Experiment
from perennial.config.learner import LearnerConfig
from perennial.privacy.accountants import solve_gaussian_multiplier
from perennial.privacy.config import DigestConfig, PrivacyConfig
from perennial.privacy.entries import RECIPIENT, Entry
from perennial.privacy.released import Mechanism

if TYPE_CHECKING:
    from perennial.privacy.digests import DigestGuarantee


def count_round_steps(learner: LearnerConfig, privacy: PrivacyConfig) -> int:
    """DP-SGD steps in one round, ceil(epochs / sample_rate): from public settings alone.

    In that many steps each sample is drawn `epochs` times on average. privacy.sample_rate must be set.
    """
    assert privacy.sample_rate is not None
    return math.ceil(learner.epochs / privacy.sample_rate)


def price_update(experiment: Experiment, run: str) -> Mechanism:
    """One round's model update."""
    privacy = experiment.privacy
    sampled = privacy.sample_rate is not None
    entry = Entry.of_update(
        privacy,
        run=run,
        experiment=experiment.digest,
        recipient=RECIPIENT,
        sample_rate=privacy.sample_rate or 1.0,
        steps=count_round_steps(experiment.learner, privacy) if sampled else 1,
    )
    return Mechanism(entry, _compute_sensitivity(privacy, privacy.clip_norm or math.inf))


def price_sums(experiment: Experiment, run: str, task: int) -> Mechanism:
    """One task's sums of features, computed from that task's samples alone.

    Their noise is sized block by block (privacy/noised_sums.py) from the entry's multiplier.
    """
    privacy = experiment.privacy
    if not privacy.enabled:
        return price_clear_release(experiment, run, "statistics")
    return Mechanism(
        Entry.of_sums(privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT, task=task)
    )


SPARSITY_DELTA = 1e-5
"""Of the noise on sparsity vectors."""


def price_sparsity(experiment: Experiment, run: str, epsilon: float | None) -> Mechanism:
    """One sparsity vector, whose length says how far a sample moves it.

    epsilon: of its noise for one sample more, less or replaced; None: it has no noise.
    """
    place = _place(experiment, run, "sparsity", unit="sample")
    if epsilon is None:
        return Mechanism(Entry(**place, mechanism="unprotected"))
    return Mechanism(
        Entry(
            **{**place, "relation": "add_remove"},
            mechanism="gaussian",
            noise_multiplier=solve_gaussian_multiplier(epsilon, SPARSITY_DELTA),
            sample_rate=1.0,
            steps=1,
        )
    )


def price_digests(
    experiment: Experiment, run: str, config: DigestConfig, guarantee: "DigestGuarantee | None" = None
) -> list[Mechanism]:
    """One task's digests: the features, and the labels if they have noise. guarantee: for a note."""
    from perennial.privacy.digests import build_digest_entries

    return [Mechanism(e) for e in build_digest_entries(config, run, experiment.digest, RECIPIENT, guarantee)]


def price_evaluation(experiment: Experiment, run: str) -> Mechanism:
    """One release of right answers on held-out samples, noised or not."""
    noise = count_noise(experiment)
    if noise is None:
        return price_clear_release(experiment, run, "evaluation")
    privacy = experiment.privacy.model_copy(update={"noise_multiplier": noise.multiplier})
    entry = Entry.of_update(privacy, run=run, experiment=experiment.digest, recipient=RECIPIENT)
    return Mechanism(replace(entry, kind="evaluation"), _compute_sensitivity(privacy, noise.norm))


def price_clear_release(experiment: Experiment, run: str, kind: str) -> Mechanism:
    """Figures without noise. kind: of release, such as statistics or evaluation."""
    return Mechanism(Entry(**_place(experiment, run, kind, unit="site"), mechanism="unprotected"))


def _compute_sensitivity(privacy: PrivacyConfig, norm: float) -> float:
    """How far one unit moves a value of this norm: twice as far where it is replaced, not added."""
    return 2 * norm if privacy.mode == "client_local" else norm


def _place(experiment: Experiment, run: str, kind: str, unit: str) -> dict[str, Any]:
    return {
        "run": run,
        "experiment": experiment.digest,
        "recipient": RECIPIENT,
        "kind": kind,
        "unit": unit,
        "relation": "replace",
    }
