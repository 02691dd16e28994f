"""Parts of a learner that belong to model dual_backbone, refused with other models."""

from typing import Any


def require_dual_backbone(experiment: Any) -> None:
    """Raises ValueError naming a part of the learner that needs an old backbone beside a new one.

    experiment: an Experiment.
    """
    learner, model = experiment.learner, experiment.model.name
    distillation, consolidation = learner.distillation, learner.consolidation
    dual = model == "dual_backbone"
    if distillation is not None and distillation.teacher == "old_backbone" and not dual:
        raise ValueError(
            "learner.distillation.teacher: found 'old_backbone', which is a part of model dual_backbone; "
            f"the model is {model}; allowed: full"
        )
    if consolidation is not None and not dual:
        raise ValueError(
            f"learner.consolidation: found with model {model}, which has one backbone and no fused features; "
            "allowed with dual_backbone"
        )
    if consolidation is not None and experiment.stopping is not None and consolidation.share < 1:
        raise ValueError(
            f"learner.consolidation.share: found {consolidation.share:g} with `stopping`, which may end a "
            "task before its last rounds; allowed: 1"
        )
