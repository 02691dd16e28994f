"""What a site does with its data: the named parts that the local learner is built from."""

import operator
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from perennial.config.yaml_file import name_only
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, suggest_nearest
from perennial.foundation.plain import FiniteBlock, Plain

CLASSIFICATIONS = (
    *("ce", "balanced_softmax", "icarl_bce", "gradient_compensation"),
    "task_temperatures",
)
_ROUNDING = 1e-9


_OTHER_OPTIMIZERS = {
    "lbfgs": "evaluates the loss several times in a step",
    "sparseadam": "takes sparse gradients",
    "muon": "takes matrices, and a site trains one vector of all its parameters",
    "adafactor": "takes matrices, and a site trains one vector of all its parameters",
}
"""Rules of torch.optim that do not fit a step of ours: name -> why."""


def _check_optimizer(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    if (reason := _OTHER_OPTIMIZERS.get(name.lower())) is not None:
        raise ValueError(f"not offered, because it {reason}; allowed: the rules for each parameter alone")
    return name.lower()


OptimizerName = Literal[
    "sgd",
    "adam",
    "adamw",
    "adadelta",
    "adagrad",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
]


class Optimizer(FiniteBlock):
    """Local optimiser; its state is fresh in every round, because momentum from another model misleads."""

    name: Annotated[OptimizerName, BeforeValidator(_check_optimizer)] = "sgd"
    """The rules of torch.optim that treat every parameter by itself, by the name of their class."""
    lr: float = Field(gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of sgd and rmsprop."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Not of rprop. Of adamw 0.01 unless it is given, as in PyTorch."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: from lr at the first round of a task towards 0 at its last."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_decay(cls, given: Any) -> Any:
        if isinstance(given, dict) and str(given.get("name")).lower() == "adamw":
            return {"weight_decay": 0.01, **given}
        return given

    @model_validator(mode="after")
    def _check_keys(self) -> "Optimizer":
        if self.momentum and self.name not in ("sgd", "rmsprop"):
            raise ValueError(
                f"momentum is an option of sgd and rmsprop; {self.name} takes lr, weight_decay and schedule"
            )
        if self.weight_decay and self.name == "rprop":
            raise ValueError("weight_decay: rprop has none; it takes lr and schedule")
        return self

    @property
    def further(self) -> dict[str, float]:
        """Keywords of the rule's class in torch.optim besides lr."""
        momentum = {"momentum": self.momentum} if self.name == "rmsprop" else {}
        return momentum if self.name == "rprop" else {**momentum, "weight_decay": self.weight_decay}


def _check_classification(name: str) -> str:
    if name not in CLASSIFICATIONS and not plugins.is_target(name):
        allowed = plugins.list_known("loss", CLASSIFICATIONS)
        raise ValueError(f"allowed: {', '.join(allowed)}{suggest_nearest(name, allowed)}")
    return name


class Classification(FiniteBlock):
    """The loss over the labels."""

    name: Annotated[str, AfterValidator(_check_classification)] = "ce"
    """gradient_compensation: GLFC's, in which a sample counts by its gradient among old or among new classes.
    task_temperatures: FedCBDR's; old and new classes have a temperature and a weight each."""
    scale: float = Field(default=1.0, ge=0)
    """balanced_softmax: multiplies the log-prior; 0 is plain cross entropy over the classes
    that the site holds."""
    sign: Literal[1, -1] = 1
    """balanced_softmax: -1 subtracts the log-prior in training, as printed in PP-FCIL;
    for the ablation only."""
    options: dict[str, Plain] = Field(default_factory=dict, exclude_if=operator.not_)
    """Keys of a loss that is a plug-in: the keywords of its constructor."""

    @model_validator(mode="after")
    def _check_options(self) -> "Classification":
        if self.options and self.name in CLASSIFICATIONS:
            raise ValueError(
                f"options: found {sorted(self.options)}, which are for plug-ins; not for {self.name}"
            )
        return self

    @property
    def needs_previous(self) -> bool:
        """Whether the loss needs the outputs of the model of the task before."""
        if self.name in CLASSIFICATIONS:
            return self.name == "icarl_bce"
        return bool(
            getattr(plugins.load("loss", self.name, "learner.classification.name"), "needs_previous", 0)
        )


class Distillation(FiniteBlock):
    """Keeps the logits of old classes close to those of the previous task's global model.

    Li and Hoiem 2016 (arXiv 1606.09282).
    """

    weight: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=2.0, gt=0)
    form: Literal["old_classes", "all_classes"] = "old_classes"
    """all_classes: GLFC's; the target holds the label too, and the softmax is over all classes."""


class Contrastive(FiniteBlock):
    """Supervised contrastive term over the features of a batch (Khosla et al. 2020, arXiv 2004.11362)."""

    weight: float = Field(default=0.1, gt=0)
    temperature: float = Field(default=0.1, gt=0)
    form: Literal["out", "in"] = "out"
    """out: mean over positives outside the logarithm; in: inside, as printed in PP-FCIL."""


class Consolidation(FiniteBlock):
    """Model dual_backbone: draws the new backbone towards the fused features, from the second task on.

    Only the new backbone goes on to the next task, as its old one; without this the next task begins with
    other features than this one ended with. FOSTER's compression (Wang et al. 2022, arXiv 2204.04662) has
    the same aim and distils logits after training; distilling features while training is ours.
    """

    weight: float = Field(default=1.0, gt=0)
    """Of the mean squared distance between the two features of a sample."""
    share: float = Field(default=0.2, gt=0, le=1)
    """Of each task's rounds, the last ones, in which the term is added."""


class Memory(FiniteBlock):
    """Exemplars that a site keeps of classes it has seen; exactly one budget."""

    selection: Literal["herding", "nearest", "random"] = "herding"
    per_class: int | None = Field(default=None, ge=1)
    """Samples of each class at each site; never shrinks."""
    fixed_total: int | None = Field(default=None, ge=1)
    """Samples of all classes at all sites together; each class's share shrinks as classes arrive."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of the samples; each is kept or not by its own hash, so that none displaces another."""
    balanced: bool = False
    """Draw every class equally often while training, instead of every sample; balanced softmax then has an
    equal prior for the classes that the site holds."""

    @model_validator(mode="after")
    def _require_one_budget(self) -> "Memory":
        budgets = (self.per_class, self.fixed_total, self.share)
        if sum(budget is not None for budget in budgets) != 1:
            raise ValueError(
                "allowed exactly one budget: per_class (each site), fixed_total (all sites together) or share"
            )
        if self.share is not None and self.selection != "random":
            raise ValueError(
                f"share keeps samples by their hash; selection must be random, not {self.selection}"
            )
        return self

    def compute_quota(self, num_classes: int, sites: int) -> int:
        """Samples that one site may keep of one class."""
        if self.share is not None:
            return sys.maxsize
        if self.per_class is not None:
            return self.per_class
        assert self.fixed_total is not None
        return self.fixed_total // (num_classes * sites)

    def require(self, num_classes: int, sites: int) -> None:
        """Raises ConfigError if the budget is below one sample of each class at each site."""
        if self.compute_quota(num_classes, sites) < 1:
            raise ConfigError(
                f"learner.memory.fixed_total: found {self.fixed_total}, allowed {num_classes * sites} or "
                f"more: one sample of each of {num_classes} classes at each of {sites} sites"
            )


class Correction(FiniteBlock):
    """A term that pulls local training towards the global model."""

    name: Literal["fedprox"]
    mu: float = Field(default=0.01, ge=0)
    """Li et al. 2020 (arXiv 1812.06127): adds mu/2 times the squared distance to the model received."""


class LearnerConfig(FiniteBlock):
    """The local learner. A published method is a choice of these parts."""

    preset: str | None = Field(default=None, exclude=True)
    """default, sample_level, replay or none: what this block is completed with, and only what differs need
    be written; the resolved experiment has every key and no preset."""
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    optimizer: Optimizer
    classification: Annotated[Classification, BeforeValidator(name_only)] = Classification()
    distillation: Distillation | None = None
    contrastive: Contrastive | None = None
    consolidation: Consolidation | None = Field(default=None, exclude_if=operator.not_)
    memory: Memory | None = None
    classifier: Literal["head", "nearest_mean"] = "head"
    """nearest_mean: of the mean features of the site's own exemplars."""
    correction: Annotated[Correction, BeforeValidator(name_only)] | None = None
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Of products in training and evaluation. tf32: GPUs round what goes into them to 10 bits; processors
    compute float32. bfloat16: autocast of the forward pass, up to the logits. Parameters, logits, losses and
    updates are float32 under each."""
    channels_last: bool = False
    """Memory layout that convolutions of GPUs prefer, of images and weights."""

    @model_validator(mode="after")
    def _check_memory(self) -> "LearnerConfig":
        if self.classifier == "nearest_mean" and self.memory is None:
            raise ValueError("classifier nearest_mean classifies by exemplars; it needs `memory`")
        return self

    def drop_idle_terms(self, progress: float) -> "LearnerConfig":
        """These settings without the loss terms that are off in this round.

        progress: share of the task's rounds that are over, 0 in its first round. Consolidation is on in the
        last rounds alone.
        """
        if self.consolidation is None or progress >= 1 - self.consolidation.share - _ROUNDING:
            return self
        return self.model_copy(update={"consolidation": None})

    @property
    def needs_previous(self) -> bool:
        """Whether training needs the global model of the task before."""
        return self.distillation is not None or self.classification.needs_previous


DEFAULT_LEARNER = LearnerConfig(
    epochs=2,
    # its steps do not grow with the inputs or the loss, so that one rate serves images, tables and all sizes
    optimizer=Optimizer(name="adam", lr=0.001),
    classification=Classification(name="balanced_softmax"),
    distillation=Distillation(weight=1.0, temperature=2.0),
    # hospitals hold their classes very unevenly; each is drawn equally often
    memory=Memory(selection="herding", per_class=20, balanced=True),
)
"""What `learner` is where an experiment leaves it out; benchmarks/results/own_data.md has its figures."""

SAMPLE_LEVEL_LEARNER = LearnerConfig(
    epochs=2,
    optimizer=Optimizer(name="adam", lr=0.001),
    distillation=Distillation(weight=1.0, temperature=2.0),
)
"""The same with privacy.mode sample: each sample's loss follows from that sample, and none is kept."""

NO_LEARNER = LearnerConfig(optimizer=Optimizer(lr=1.0))
"""What stands in the place of `learner` where nothing is trained by gradients, and is not used."""
