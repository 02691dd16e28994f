"""The site half of a method: what a site does for it around its local training.

A method is a server half and a site half in one file of `strategies/`. The site runs the halves that its
approved experiment names, and no others; a request can only set what a half reads from it.

Symbols: P floats of the model, T of them trained, B batch size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.config.strategies import STRATEGIES, asks_of, nested
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.foundation.plain import read_object
from perennial.learning.losses import Batch
from perennial.learning.objective import Extra
from perennial.models.flat import FlatParameters
from perennial.protocol.messages import TrainRequest

if TYPE_CHECKING:
    from perennial.config.experiment import Experiment

Part = TypeVar("Part")
OptionalTerm = Callable[[Batch], Tensor | None]


class Records(Protocol):
    """What a site keeps on its disk in one run: the newest record of a name that is older than a round."""

    def get(self, name: str, before: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...

    def put(self, name: str, version: int, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None: ...

    def forget(self, name: str, after: int, before: int) -> None: ...


@dataclass(frozen=True)
class LocalTurn:
    """A site's training in one round, as a half sees it.

    flat: the model as it was received. seed: the experiment's. records: what this site keeps in this run.
    """

    site: str
    seed: int
    learner: LearnerConfig
    request: TrainRequest
    flat: FlatParameters
    input_shape: tuple[int, ...]
    device: torch.device
    records: Records

    def read_settings(self, key: str, kind: type[Part]) -> Part | None:
        """Read the request's settings under a key, validated as `kind`; None without that key.

        Raises:
            ProtocolError: a value is not allowed; it names the key.
        """
        return part_of_settings(self.request, key, kind)


class SiteMethod:
    """The site half of a method; each default does nothing. One object lives for one turn.

    pull, shift: a half that changes every gradient by shift + pull * (parameters - received) sets them in
    `open`, and then works for sites that train in one pass too. shift: (T,).
    """

    pull: float = 0.0
    shift: Tensor | None = None

    def __init__(self, keys: Mapping[str, Any]) -> None:
        """Begin a turn. keys: the strategy's, from the approved experiment."""
        self.keys = keys

    def open(self, turn: LocalTurn) -> None:
        """Prepare before the first step.

        Raises:
            ProtocolError: the request's settings are not allowed.
        """

    def correct(self, gradient: Tensor, parameters: Tensor, received: Tensor) -> None:
        """Change the gradient of one step in place. All are (T,)."""

    def extra_loss(self, batch: Batch) -> Tensor | None:
        """Return a term to add to the loss of one batch, a scalar; None: no term."""

    def make_extra(self) -> Extra | None:
        """Return a term on inputs of its own, begun anew for each training; None: no term."""

    def close(self, update: Tensor, steps: int) -> None:
        """Remember what later rounds need. update: (P,), as released. steps: of the optimiser."""


class FedProx(SiteMethod):
    """Adds mu / 2 times the squared distance to the model received (Li et al. 2020, arXiv 1812.06127)."""

    def open(self, turn: LocalTurn) -> None:
        self.pull = float(self.keys["mu"])


@dataclass(frozen=True)
class GradientCorrection:
    """Changes each gradient to gradient + shift + pull * (parameters - received), then by each of others.

    shift: (T,) or None.
    """

    shift: Tensor | None = None
    pull: float = 0.0
    others: tuple[Callable[[Tensor, Tensor, Tensor], None], ...] = ()

    def apply(self, gradient: Tensor, parameters: Tensor, received: Tensor) -> None:
        """Change gradient (T,) in place. parameters, received: (T,)."""
        if self.shift is not None:
            gradient.add_(self.shift)
        if self.pull:
            gradient.add_(parameters - received, alpha=self.pull)
        for correct in self.others:
            correct(gradient, parameters, received)


@dataclass(frozen=True)
class SiteMethods:
    """The halves that a site runs in one turn."""

    methods: Sequence[SiteMethod] = ()

    @classmethod
    def of(cls, experiment: "Experiment") -> "SiteMethods":
        """Build the halves that an approved experiment names: its learner's, and its strategies'."""
        correction = experiment.learner.correction
        proximal = [] if correction is None else [FedProx(correction.model_dump())]
        strategy = experiment.strategy
        halves = [
            site_half_of(name)(keys)
            for name, keys in nested(strategy.name, strategy.parameters)
            if asks_of(name, keys).site_half
        ]
        return cls([*proximal, *halves])

    def open(self, turn: LocalTurn) -> None:
        for method in self.methods:
            method.open(turn)

    def close(self, update: Tensor, steps: int) -> None:
        for method in self.methods:
            method.close(update, steps)

    @property
    def correction(self) -> GradientCorrection | None:
        """What all halves do to a gradient; None if they do nothing."""
        pull = sum(method.pull for method in self.methods)
        shifts = [method.shift for method in self.methods if method.shift is not None]
        others = tuple(method.correct for method in self.methods if _overrides(method, "correct"))
        if not pull and not shifts and not others:
            return None
        return GradientCorrection(sum(shifts[1:], shifts[0]) if shifts else None, pull, others)

    @property
    def extra(self) -> Extra | None:
        made = (method.make_extra() for method in self.methods)
        return next((extra for extra in made if extra is not None), None)

    @property
    def terms(self) -> tuple[OptionalTerm, ...]:
        """The terms of the halves that add one to the loss of a batch."""
        return tuple(method.extra_loss for method in self.methods if _overrides(method, "extra_loss"))

    @property
    def one_site_alone(self) -> bool:
        """Whether some half has no form for several sites that train in one pass."""
        return any(_overrides(method, name) for method in self.methods for name in ("correct", "extra_loss"))


def _overrides(method: SiteMethod, name: str) -> bool:
    return getattr(type(method), name) != getattr(SiteMethod, name)


def site_half_of(name: str) -> type[SiteMethod]:
    """Return the site half of a strategy, which is the attribute `site_half` of its class.

    Raises:
        ConfigError: the strategy has none, or is a plug-in that this site does not name.
    """
    where = "strategy.name"
    ours = name in STRATEGIES
    strategy = plugins.load_ours(STRATEGIES[name]) if ours else plugins.load("strategy", name, where)
    half = getattr(strategy, "site_half", None)
    if not (isinstance(half, type) and issubclass(half, SiteMethod)):
        raise ConfigError(
            f"{where}: {name}: its asks say site_half, and its class has {half!r:.60} there; allowed: a "
            "subclass of perennial.SiteMethod"
        )
    return half


def part_of_settings(request: TrainRequest, key: str, kind: type[Part] | TypeAdapter[Part]) -> Part | None:
    """Read the request's settings under a key, validated as `kind`; None without that key.

    Raises:
        ProtocolError: the settings are no JSON object, or a value is not allowed; it names the key.
    """
    try:
        settings = read_object(request.settings)
    except ValueError as error:
        raise ProtocolError(f"TrainRequest: settings: {error}") from error
    if key not in settings:
        return None
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(settings[key])
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(("settings", key, *map(str, fault["loc"])))
        raise ProtocolError(f"TrainRequest: {place}: found {fault['input']!r:.40}; {fault['msg']}") from None
