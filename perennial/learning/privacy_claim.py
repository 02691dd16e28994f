"""Checks whether an experiment's privacy claim can be true, as far as its settings decide it.

Both sides ask: the server before a run starts, and each site before anything leaves it, because a server that
did not ask would still have its sites charge a finite epsilon for a claim that is false.
"""

from collections.abc import Sequence

from perennial.config.experiment import Experiment
from perennial.privacy.combinations import ReleaseProtection, refuse_false_claims


def check_claim(
    experiment: Experiment,
    *,
    segments: int = 1,
    sparsity: ReleaseProtection | None = None,
    weights_use_metrics: bool = False,
    clear_uploads: Sequence[str] = (),
    normalisation_from_data: bool = False,
) -> None:
    """Refuse an experiment whose privacy claim would be false; mode none claims nothing.

    The keywords are facts that the settings alone do not say, as in refuse_false_claims; leave them out if
    you do not know them.

    Raises PrivacyError with every reason.
    """
    if not experiment.privacy.enabled:
        return
    # the losses need PyTorch, which a site without a claim need not import for this
    from perennial.learning.objective import list_coupled_terms

    learner, memory, digests = experiment.learner, experiment.learner.memory, experiment.digests
    refuse_false_claims(
        experiment.privacy,
        norm=experiment.model.resolved_norm,
        memory_selection=memory.selection if memory else None,
        memory_displaces=memory is not None and memory.share is None,
        balanced_replay=memory is not None and memory.balanced,
        coupled_terms=list_coupled_terms(learner),
        needs_every_class=learner.classification.name == "balanced_softmax"
        and learner.classification.sign < 0,
        segments=segments,
        weights_use_metrics=weights_use_metrics,
        clear_uploads=clear_uploads,
        digest=None
        if digests is None
        else "sample"
        if digests.protects and not digests.labels_in_the_clear
        else "none",
        sparsity=sparsity,
        normalisation_from_data=normalisation_from_data,
    )
