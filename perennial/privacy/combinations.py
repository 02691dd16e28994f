"""Combinations of settings whose epsilon would be a false claim, each refused with its reason."""

from collections.abc import Sequence
from typing import Literal

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import PrivacyConfig

ReleaseProtection = Literal["none", "site", "sample"]


def refuse_false_claims(
    privacy: PrivacyConfig,
    *,
    norm: str,
    memory_selection: str | None = None,
    memory_displaces: bool = False,
    balanced_replay: bool = False,
    coupled_terms: Sequence[str] = (),
    needs_every_class: bool = False,
    segments: int = 1,
    normalisation_from_data: bool = False,
    weights_use_metrics: bool = False,
    clear_uploads: Sequence[str] = (),
    digest: ReleaseProtection | None = None,
    sparsity: ReleaseProtection | None = None,
) -> None:
    """Raises PrivacyError with every reason for which the claim of this privacy block would be false.

    norm: the model's normalisation, "batch" being the one that mixes samples.
    memory_selection: how exemplars are chosen, None without a memory; memory_displaces: its budget counts
    samples, so that one more displaces another; balanced_replay: batches drawn by class.
    normalisation_from_data: inputs are scaled by figures of the training data, such as its mean.
    coupled_terms: names of the terms of the loss in which a sample's value depends on other samples.
    needs_every_class: the loss refuses a site that lacks a class.
    segments: of a site's data, one a turn of a ring.
    weights_use_metrics: aggregation weights depend on loss or accuracy that sites report.
    clear_uploads: names of arrays or figures that a reply carries beside the protected update.
    digest, sparsity: the unit that the release's own noise protects, "none" without a proven guarantee; None
    when it is not sent at all.
    """
    if not privacy.enabled:
        return
    of_samples = privacy.mode == "sample"
    rules = [
        (
            weights_use_metrics,
            "the aggregation weights use loss or accuracy that sites report in the clear, which no "
            "accountant covers; set their coefficients to 0",
        ),
        (
            clear_uploads,
            f"replies carry {', '.join(clear_uploads)} beside the update, unclipped and without noise; "
            "choose a strategy that exchanges updates only",
        ),
        *_of_release(privacy, "digest", digest),
        *_of_release(privacy, "sparsity vector", sparsity),
        (
            normalisation_from_data,
            "inputs are made with figures of the training data, which carry no noise: their mean "
            "and deviation, or a table's categories and medians; give public ones in data.normalise, "
            "data.columns and data.imputation",
        ),
        (
            segments > 1,
            "which samples a segment holds depends on the others, and every turn is a release of its own "
            "while the run's account counts one in a round; use 1 segment",
        ),
        (
            norm == "batch" and of_samples,
            "BatchNorm normalises a sample with the others of its batch, so there is no gradient of one "
            "sample to clip; use model.norm: group",
        ),
        (
            norm == "batch" and not of_samples,
            "BatchNorm's running variance travels in the update, where noise can make it negative and the "
            "model useless; use model.norm: group",
        ),
        (
            of_samples and memory_selection not in (None, "random"),
            f"memory.selection {memory_selection} lets one sample decide which others are kept, so no "
            "exemplar is a fixed record and the sample-level proof fails; use selection: random",
        ),
        (
            of_samples and balanced_replay,
            "class-balanced batches draw rare classes more often than the sampling rate that the "
            "accountant counts; the real epsilon can be orders of magnitude larger (pytorch/opacus#813); "
            "use memory.balanced: false",
        ),
        (of_samples and coupled_terms, explain_coupled(coupled_terms)),
        (
            needs_every_class,
            "learner.classification.sign -1 needs samples of every class, so that whether a site answers "
            "tells whether it lacks one; use sign: 1",
        ),
        (
            of_samples and memory_displaces and memory_selection == "random",
            "with a budget of per_class or fixed_total one more sample displaces another exemplar, so it "
            "changes two records of later tasks while one is accounted; use memory.share",
        ),
    ]
    if reasons := [reason for holds, reason in rules if holds]:
        raise PrivacyError(f"privacy.mode {privacy.mode}: " + "; ".join(reasons))


def _of_release(
    privacy: PrivacyConfig, name: str, protects: ReleaseProtection | None
) -> list[tuple[object, str]]:
    return [
        (
            protects == "none",
            f"the {name} would leave without a proven guarantee; give it noise with a stated epsilon",
        ),
        (
            protects == "sample" and privacy.hidden_unit != "sample",
            f"the {name} hides one sample, while this mode claims to hide a whole {privacy.hidden_unit}; "
            "use privacy.mode: sample with unit sample, or send none",
        ),
    ]


def explain_coupled(terms: Sequence[str]) -> str:
    """A sentence that says why DP-SGD cannot have these loss terms."""
    return (
        f"{', '.join(terms)}: a sample's loss depends there on other samples, so clipping one sample's "
        "gradient does not bound what that sample changes; allowed: terms whose values follow from each "
        "sample by itself, such as classification ce or icarl_bce, and distillation"
    )
