"""Refuses a privacy claim that the strategy or the data would make false, and names open channels."""

from perennial.config.experiment import Experiment
from perennial.learning.privacy_claim import check_claim
from perennial.strategies.base import IncrementalStrategy


def check_privacy(
    experiment: Experiment, strategy: IncrementalStrategy, *, rounds: int, estimated_constants: bool
) -> None:
    """Raise PrivacyError with every reason for which the experiment's privacy claim would be false.

    rounds: of the whole run. estimated_constants: whether inputs are normalised by figures
    of the training data.
    """
    disclosed = strategy.disclosures()
    check_claim(
        experiment,
        sparsity=disclosed.sparsity,
        weights_use_metrics=disclosed.weights_use_metrics,
        clear_uploads=disclosed.clear_uploads,
        normalisation_from_data=estimated_constants,
        planned_rounds=rounds,
    )
    if experiment.privacy.mode == "client_central":
        strategy.largest_weight(1)


def open_channels(experiment: Experiment) -> tuple[str, ...]:
    """In words, whatever leaves a site, or shows in the run, without noise although privacy is on."""
    channels = []
    if experiment.evaluation.central:
        channels.append("the samples of the server's own test set, on which it measures the model")
    if experiment.learner.memory is not None and experiment.privacy.mode == "sample":
        channels.append(
            f"a {experiment.privacy.hidden_unit} kept as an exemplar is counted in every later round, "
            "as if it were in all"
        )
    capped = [
        key for key in ("samples_limit", "test_limit") if isinstance(getattr(experiment.data, key), int)
    ]
    if capped and experiment.privacy.mode == "sample":
        channels.append(
            f"how a simulation's data were cut by data.{' and data.'.join(capped)}, a number: its threshold "
            "follows how many records there are; a share moves none, and real sites cut nothing"
        )
    return tuple(channels)
