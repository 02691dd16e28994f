"""What a privacy claim of this experiment would have to be true: refused where it is not, and named where a
channel stays open."""

from config.experiment import Experiment
from privacy.combinations import refuse_false_claims
from strategies.base import IncrementalStrategy


def check_privacy(
    experiment: Experiment, strategy: IncrementalStrategy, *, rounds: int, estimated_constants: bool
) -> None:
    """Raises PrivacyError with every reason for which the experiment's privacy claim would be false.

    rounds: of the whole run. estimated_constants: whether inputs are normalised by figures of the training
    data.
    """
    learner, memory, told = experiment.learner, experiment.learner.memory, strategy.disclosures()
    privacy, digests = experiment.privacy, experiment.digests
    refuse_false_claims(
        privacy,
        norm=experiment.model.norm or "none",
        memory_selection=memory.selection if memory else None,
        memory_displaces=memory is not None and memory.share is None,
        balanced_replay=memory is not None and memory.balanced,
        classification_uses_counts=learner.classification.name == "balanced_softmax",
        loss_couples_samples=learner.contrastive is not None
        or learner.classification.name == "gradient_compensation",
        weights_use_metrics=told.weights_use_metrics,
        clear_uploads=told.clear_uploads,
        digest=None if digests is None else "sample" if digests.protects else "none",
        sparsity=told.sparsity,
        normalisation_from_data=estimated_constants,
        planned_rounds=rounds,
    )
    if privacy.mode == "client_central":
        strategy.asked = strategy.asked or 1
        strategy.largest_weight()


def open_channels(experiment: Experiment) -> tuple[str, ...]:
    """What leaves a site, or shows in the run, without noise although privacy is on."""
    channels = []
    if experiment.privacy.allow_unaccounted_metrics:
        channels.append("sample counts, losses and numbers of right answers, which sites report in the clear")
    if experiment.evaluation.central:
        channels.append("the samples of the server's own test set, on which it measures the model")
    if experiment.learner.memory is not None and experiment.privacy.unit == "sample":
        channels.append("a sample kept as an exemplar is counted in every later round, as if it were in all")
    if experiment.digests is not None:
        labels = "the labels of the digests, and " if experiment.digests.labels == "public" else ""
        channels.append(f"{labels}how many digests a site lends, which follows its number of samples")
    return tuple(channels)
