"""The site half of a method: what a site does for it around its local training.

A method is a server half and a site half in one file of `strategies/`. The site runs the halves that its
approved experiment names, and no others; a request can only set what a half reads from it.

Symbols: P floats of the model, T of them trained, B batch size.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.config.strategies import SITE_HALVES, STRATEGIES, find_asks, list_nested
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.foundation.plain import read_object
from perennial.learning.losses import Batch
from perennial.learning.objective import Extra
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp

if TYPE_CHECKING:
    from perennial.config.experiment import Experiment

Part = TypeVar("Part")
Answers = Mapping[type, Callable[[Any, Any], Any]]
"""Kind of request -> what a site does for it: (site, request) -> reply."""
OptionalTerm = Callable[[Batch], Tensor | None]


class Records(Protocol):
    """What a site keeps on its disk in one run: the newest record of a name that is older than a round."""

    def get(self, name: str, before: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...

    def put(self, name: str, version: int, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None: ...

    def forget(self, name: str, after: int, before: int) -> None: ...


@dataclass(frozen=True)
class TurnStart:
    """A site's training in one round, before a sample is chosen. seed: the experiment's.

    records: what this site keeps in this run.
    """

    site: str
    seed: int
    request: TrainRequest
    records: Records

    def read_settings(self, key: str, kind: "type[Part] | TypeAdapter[Part]") -> Part | None:
        """Read the request's settings under a key, validated as `kind`; None without that key.

        Raises:
            ProtocolError: a value is not allowed; it names the key.
        """
        return read_settings_part(self.request, key, kind)


@dataclass(frozen=True)
class LocalTurn(TurnStart):
    """The same once the model is there. flat: the model as it was received."""

    learner: LearnerConfig
    flat: FlatParameters
    input_shape: tuple[int, ...]
    device: torch.device


class PlannedRun(Protocol):
    """The requests of an approved experiment, as a half sees them."""

    @property
    def experiment(self) -> "Experiment": ...

    @property
    def last_rounds(self) -> list[int]:
        """Number of each task's last round."""
        ...

    def most(self, kind: str, number: int) -> int:
        """Most requests of a kind that a site gets in round `number`."""
        ...


class SiteMethod:
    """The site half of a method; each default does nothing. One object lives for one turn.

    pull, shift: a half that changes every gradient by shift + pull * (parameters - received) sets them in
    `open`, and then works for sites that train in one pass too. shift: (T,).
    answers: what the half does for requests of kinds that are the method's own.
    stays: names of tensors that are no part of the reply. alone: whether the site cannot train in one pass
    with others. batch_ids: further ids of the stream that draws batches. claim: facts about the turn that a
    privacy claim depends on (check_claim() in client/policy).
    """

    answers: ClassVar[Answers] = {}
    pull: float = 0.0
    shift: Tensor | None = None
    stays: tuple[str, ...] = ()
    alone: bool = False
    batch_ids: tuple[int, ...] = ()
    claim: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, keys: Mapping[str, Any]) -> None:
        """Begin a turn. keys: the strategy's, from the approved experiment."""
        self.keys = keys

    # the requests that the approved experiment makes

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        """Count the requests of a kind in round `number` that the method adds to the usual ones."""
        return 0

    def extra_questions(self, plan: PlannedRun) -> tuple[int, int]:
        """(requests, models) of a whole run that a site answers with counts of held-out samples.

        Evaluations are not among them.
        """
        return 0, 0

    def check(self, request: Stamp, plan: PlannedRun) -> None:
        """Check a request against the approved experiment.

        Raises:
            PolicyRefusal: the experiment does not make it.
        """

    # one turn of training

    def begin(self, start: TurnStart) -> None:
        """Read the request's settings, before samples are chosen.

        Raises:
            ProtocolError: the request's settings are not allowed.
        """

    def choose(self, rows: Tensor, exemplars: int) -> tuple[Tensor, int]:
        """Return the samples to train on, and how many of them are exemplars, which come last.

        Args:
            rows: (n,) indices of the task's samples at this site.
            exemplars: how many of them are exemplars.
        """
        return rows, exemplars

    def receive(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model that training starts from. arrays: as received."""
        return arrays

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

    def finish(self, trained: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> None:
        """Take what stays at the site out of the update, in place, before the update is protected."""

    def close(self, update: Tensor, steps: int) -> None:
        """Remember what later rounds need. update: (P,), as released. steps: of the optimiser."""

    # the models that a site keeps

    def sees_model(self, site: Any, model: IncrementalModel) -> None:
        """Take note of the global model, which is about to be judged on this site's test samples."""

    def owns_model(self, records: Records, before: int) -> bool:
        """Whether the site's model is another one than the global one since a round before `before`."""
        return False


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
    others: tuple[Callable[[Tensor, Tensor, Tensor], object], ...] = ()

    def apply(self, gradient: Tensor, parameters: Tensor, received: Tensor) -> None:
        """Change gradient (T,) in place. parameters, received: (T,)."""
        if self.shift is not None:
            gradient.add_(self.shift)
        if self.pull:
            gradient.add_(parameters - received, alpha=self.pull)
        for correct in self.others:
            # a researcher's own half may return what it meant to change
            if (returned := correct(gradient, parameters, received)) is not None:
                name = getattr(correct, "__qualname__", repr(correct))
                raise ConfigError(
                    f"{name}: returned a {type(returned).__name__}; has to change the gradient in place"
                )


@dataclass(frozen=True)
class SiteMethods:
    """The halves that a site runs in one turn."""

    methods: Sequence[SiteMethod] = ()

    @classmethod
    def of(cls, experiment: "Experiment") -> "SiteMethods":
        """Build the halves that an approved experiment names: its learner's, and its strategies'."""
        correction = experiment.learner.correction
        proximal = [] if correction is None else [FedProx(correction.model_dump())]
        return cls([*proximal, *_build_halves(experiment)])

    @classmethod
    def planned(cls, experiment: "Experiment") -> "SiteMethods":
        """Build those that may add requests: of our own strategies, since a plug-in may not be here yet."""
        return cls(_build_halves(experiment, STRATEGIES))

    def begin(self, start: TurnStart) -> None:
        for method in self.methods:
            method.begin(start)

    def choose(self, rows: Tensor, exemplars: int) -> tuple[Tensor, int]:
        for method in self.methods:
            rows, exemplars = method.choose(rows, exemplars)
        return rows, exemplars

    def receive(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for method in self.methods:
            arrays = method.receive(arrays)
        return arrays

    def open(self, turn: LocalTurn) -> None:
        for method in self.methods:
            try:
                method.open(turn)
            except StateError as error:
                if not type(method).__module__.startswith("perennial."):
                    error.args = (f"{plugins.name_of(type(method))}: {error}",)
                raise

    def finish(self, flat: FlatParameters, update: Tensor) -> None:
        """update: (P,), changed in place."""
        for method in self.methods:
            if _is_overridden(method, "finish"):
                method.finish(flat.view_tensors(flat.vector), flat.view_tensors(update))

    def close(self, update: Tensor, steps: int) -> None:
        for method in self.methods:
            method.close(update, steps)

    def owns_model(self, records: Records, before: int) -> bool:
        return any(method.owns_model(records, before) for method in self.methods)

    def answer_to(self, kind: type) -> Callable[[Any, Any], Any] | None:
        """Return what answers a request of this kind; None: no half does."""
        return next((method.answers[kind] for method in self.methods if kind in method.answers), None)

    @property
    def stays(self) -> tuple[str, ...]:
        return tuple(name for method in self.methods for name in method.stays)

    @property
    def batch_ids(self) -> tuple[int, ...]:
        return tuple(number for method in self.methods for number in method.batch_ids)

    @property
    def claim(self) -> dict[str, Any]:
        return {name: fact for method in self.methods for name, fact in method.claim.items()}

    @property
    def correction(self) -> GradientCorrection | None:
        """What all halves do to a gradient; None if they do nothing."""
        pull = sum(method.pull for method in self.methods)
        shifts = [method.shift for method in self.methods if method.shift is not None]
        others = tuple(method.correct for method in self.methods if _is_overridden(method, "correct"))
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
        return tuple(method.extra_loss for method in self.methods if _is_overridden(method, "extra_loss"))

    @property
    def one_site_alone(self) -> bool:
        """Whether some half has no form for several sites that train in one pass."""
        return any(
            method.alone or _is_overridden(method, "correct") or _is_overridden(method, "extra_loss")
            for method in self.methods
        )


def _is_overridden(method: SiteMethod, name: str) -> bool:
    return getattr(type(method), name) != getattr(SiteMethod, name)


def _build_halves(experiment: "Experiment", among: Container[str] | None = None) -> list[SiteMethod]:
    strategy = experiment.strategy
    return [
        find_site_half(name)(keys)
        for name, keys in list_nested(strategy.name, strategy.parameters)
        if (name in SITE_HALVES or find_asks(name, keys).site_half) and (among is None or name in among)
    ]


def find_site_half(name: str) -> type[SiteMethod]:
    """Return the site half of a strategy: by the registry, or the attribute `site_half` of a plug-in's class.

    Raises:
        ConfigError: the strategy has none, or is a plug-in that this site does not name.
    """
    where = "strategy.name"
    if name in SITE_HALVES:
        return plugins.load_ours(SITE_HALVES[name])
    half = getattr(plugins.load("strategy", name, where), "site_half", None)
    if not (isinstance(half, type) and issubclass(half, SiteMethod)):
        raise ConfigError(
            f"{where}: {name}: its asks say site_half, and its class has {half!r:.60} there; allowed: a "
            "subclass of perennial.SiteMethod"
        )
    return half


def read_settings_part(request: TrainRequest, key: str, kind: type[Part] | TypeAdapter[Part]) -> Part | None:
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
