"""The keys of experiment.yaml, each with its block."""

import hashlib
import json
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perennial.config.learner import NO_LEARNER, LearnerConfig
from perennial.config.rounds import (
    AbsenceConfig,
    AdversaryConfig,
    BoundsConfig,
    EvaluationConfig,
    PretrainingConfig,
    RoundsConfig,
)
from perennial.config.secure import SecureConfig
from perennial.config.strategies import Asks, find_asks, list_nested
from perennial.config.yaml_file import name_only
from perennial.data.config import DataConfig
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import suggest_nearest
from perennial.foundation.plain import Block, Plain
from perennial.models.config import ModelConfig
from perennial.privacy.config import DigestConfig, PrivacyConfig

ON_DISK: Any = {
    "data": {"path"},
    "model": {"features": {"__all__": {"file"}}},
}
"""Settings that say where something lies on a disk, and nothing about what it is."""


class StrategySpec(BaseModel):
    """A strategy's name and its own keys; a strategy that takes another one has it under `base`.

    The keys are checked against the strategy itself when it is built, before anything starts.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Plain] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    name: str

    @property
    def asks(self) -> Asks:
        """What requests of this strategy may ask of a site, without those of strategies that it wraps."""
        return find_asks(self.name, self.parameters)

    @property
    def trains(self) -> bool:
        """Whether sites train by gradients, under this strategy or one that it wraps."""
        return not any(
            find_asks(name, keys).statistics for name, keys in list_nested(self.name, self.parameters)
        )

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ExperimentFields(Block):
    """The keys of an experiment, and what follows from them; Experiment (experiment.py) checks them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    seed: int = Field(default=1, ge=0)
    data: DataConfig
    tasks: TasksConfig
    model: ModelConfig
    learner: LearnerConfig = NO_LEARNER
    strategy: Annotated[StrategySpec, BeforeValidator(name_only)] = StrategySpec(name="fedavg")
    bounds: BoundsConfig = BoundsConfig()
    secure: SecureConfig | None = None
    """The server learns sums over sites alone; None: it sees each site's update."""
    privacy: PrivacyConfig = PrivacyConfig()
    digests: DigestConfig | None = None
    """What sites lend for the time when they are away; None: nothing."""
    pretraining: PretrainingConfig | None = None
    rounds: RoundsConfig = RoundsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    absence: list[AbsenceConfig] = Field(default_factory=list)
    adversaries: list[AdversaryConfig] = Field(default_factory=list)
    plugins: dict[str, str] = Field(default_factory=dict, exclude_if=operator.not_)
    """Other people's methods in this experiment: `module:Class` -> SHA-256 of its source, written down when
    the experiment is read."""

    def require_sites(self, known: Sequence[str]) -> None:
        """Raises ValueError when absence or adversaries name a site that is not among the known ones."""
        for key in ("absence", "adversaries"):
            for entry in getattr(self, key):
                if entry.site not in known:
                    found = f"{key}: found site {entry.site!r}{suggest_nearest(entry.site, known)}"
                    raise ValueError(f"{found}, allowed {', '.join(known[:5])}{', ...' if known[5:] else ''}")

    def lead_rounds(self, task: int) -> int:
        """Rounds of pre-training that come before the rounds of a task."""
        return self.pretraining.rounds if self.pretraining is not None and task == 1 else 0

    @property
    def has_own_heads(self) -> bool:
        """Whether sites get heads of their own: those of a closed form whose data name their sites."""
        natural = self.data.partition.kind == "natural" and not self.data.only_at_sites
        return self.strategy.name == "analytic" and natural

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the resolved settings, which identifies the experiment in every message.

        The paths of files on a disk are not part of it.
        """
        settings = self.model_dump(mode="json", exclude=ON_DISK)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @property
    def needs_previous(self) -> bool:
        """Whether sites need the global model of the previous task.

        They need it to distil from it, to build on it, or to choose exemplars.
        """
        learner = self.learner
        model_needs = self.model.name == "dual_backbone"
        return learner.needs_previous or learner.memory is not None or model_needs

    def to_yaml(self) -> str:
        """The resolved experiment, every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
