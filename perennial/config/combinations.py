"""Which settings of an experiment cannot go together, each with what is allowed in its place."""

from collections.abc import Callable

from perennial.config.evaluation import require_calibration, require_covered_counts
from perennial.config.learner import NO_LEARNER
from perennial.config.schema import ExperimentFields
from perennial.config.secure import refuse_what_needs_single_updates, require_shared_noise
from perennial.config.strategies import (
    ASKS,
    LOCAL_STEPS,
    REMOVED,
    STRATEGIES,
    explain_uncovered,
    find_asks,
    list_nested,
)
from perennial.foundation import plugins


def _check_names(experiment: ExperimentFields) -> None:
    """Strategies are refused by name here already, because the factory that builds them takes PyTorch."""
    where = "strategy"
    for name, _ in list_nested(experiment.strategy.name, experiment.strategy.parameters):
        if name not in STRATEGIES and name not in REMOVED and not plugins.is_target(name):
            raise ValueError(str(plugins.refuse_unknown("strategy", name, STRATEGIES, f"{where}.name")))
        where += ".base"


def _check_learner(experiment: ExperimentFields) -> None:
    strategy = experiment.strategy
    if not strategy.trains and experiment.learner != NO_LEARNER:
        raise ValueError(
            f"learner: found one, but nothing is trained under strategy {strategy.name}; leave it out"
        )


def _check_release(experiment: ExperimentFields) -> None:
    """The privacy block is about what leaves, and maps are chosen only where a head can choose."""
    privacy, strategy, model = experiment.privacy, experiment.strategy, experiment.model
    if privacy.enabled and not strategy.trains and privacy.release != "sums":
        raise ValueError(
            f"privacy: found mode {privacy.mode!r} with release 'updates', and strategy {strategy.name} "
            "sends sums of features; allowed: mode sample or sample_shared, release sums"
        )
    if privacy.enabled and (why := explain_uncovered_sums(experiment)):
        raise ValueError(why)
    heads = [keys.get("head") for _, keys in list_nested(strategy.name, strategy.parameters)]
    if model.choices and "auto" not in heads:
        raise ValueError(
            "model.features: found a choice between maps, which head auto of strategy analytic makes; "
            "allowed: head: auto, or one of the maps by itself"
        )
    if privacy.release == "sums" and strategy.trains:
        raise ValueError(
            f"privacy.release: found 'sums', and strategy {strategy.name} sends updates; allowed "
            f"with {', '.join(name for name, asks in ASKS.items() if asks.statistics)}"
        )


def explain_uncovered_sums(experiment: ExperimentFields) -> str:
    """Why no accountant covers what the experiment's sums ask of a site under privacy; "" if one does."""
    strategy = experiment.strategy
    found = list_nested(strategy.name, strategy.parameters)
    own = (keys for name, keys in found if find_asks(name, keys).statistics)
    return next((why for keys in own if (why := explain_uncovered(keys))), "")


def _check_masks(experiment: ExperimentFields) -> None:
    if experiment.secure is not None:
        refuse_what_needs_single_updates(experiment)
    if experiment.privacy.shared:
        require_shared_noise(experiment)


def _check_sites(experiment: ExperimentFields) -> None:
    names = [adversary.site for adversary in experiment.adversaries]
    if len(set(names)) < len(names):
        raise ValueError(f"adversaries: a site is listed twice: {', '.join(names)}")
    if experiment.data.shares is not None:
        experiment.require_sites(experiment.data.shares)


def _check_pretraining(experiment: ExperimentFields) -> None:
    mode = experiment.privacy.mode
    why = {
        "client_central": "plain averaging adds no noise at the server",
        "client_shared": "its rounds have no masked sum",
        "sample": "which samples of a class are chosen depends on the others",
    }
    if experiment.pretraining is not None and mode in why:
        raise ValueError(
            f"pretraining: not with privacy.mode {mode!r}, because {why[mode]}; allowed with none and "
            "client_local"
        )


def _check_patients(experiment: ExperimentFields) -> None:
    data = experiment.data
    named = data.patient is not None or data.only_at_sites or "patient" in data.arrays
    if experiment.privacy.unit == "patient" and not named:
        raise ValueError("data.patient: missing; privacy.unit is patient, so the data must name the patients")


def _check_precision(experiment: ExperimentFields) -> None:
    precision = experiment.learner.precision
    if experiment.privacy.mode == "sample" and precision != "float32":
        raise ValueError(
            f"learner.precision: found {precision!r} with privacy.mode 'sample', which clips gradients of "
            "one sample and computes them in float32 alone; allowed: float32"
        )


def _check_dual_backbone(experiment: ExperimentFields) -> None:
    """Parts of a learner that need an old backbone beside a new one."""
    consolidation, model = experiment.learner.consolidation, experiment.model.name
    dual = model == "dual_backbone"
    if consolidation is not None and not dual:
        raise ValueError(
            f"learner.consolidation: found with model {model}, which has one backbone and no fused features; "
            "allowed with dual_backbone"
        )


def _check_local_steps(experiment: ExperimentFields) -> None:
    for name, _ in list_nested(experiment.strategy.name, experiment.strategy.parameters):
        for key, needed in LOCAL_STEPS.get(name, {}).items():
            found = getattr(experiment.learner.optimizer, key)
            if found != needed:
                raise ValueError(
                    f"learner.optimizer.{key}: found {found!r}; strategy {name} counts local steps of plain "
                    f"SGD of one size; allowed: {needed!r}"
                )


def _check_bounds(experiment: ExperimentFields) -> None:
    names = [name for name, _ in list_nested(experiment.strategy.name, experiment.strategy.parameters)]
    experiment.bounds.require_fit("analytic" in names)


CHECKS: tuple[Callable[[ExperimentFields], None], ...] = (
    *(_check_names, _check_learner, _check_release),
    *(require_covered_counts, require_calibration),
    *(_check_masks, _check_sites, _check_pretraining),
    *(_check_patients, _check_precision, _check_dual_backbone, _check_bounds, _check_local_steps),
)
"""Each raises ValueError naming the key; the first that does is what a person reads."""
