"""One line of a site's ledger: a release, to whom, and the guarantee that it had."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import PrivacyConfig, Unit

Relation = Literal["add_remove", "replace"]
Mechanism = Literal["gaussian", "discrete_gaussian", "stated", "unprotected"]
RECIPIENT = "server"
"""Whoever a site releases to in a federation."""

_ALLOWED: dict[str, tuple[str, ...]] = {
    "unit": get_args(Unit),
    "relation": ("add_remove", "replace"),
    "mechanism": ("gaussian", "discrete_gaussian", "stated", "unprotected"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A release that leaves, or is about to leave, a site.

    kind: update, digest, sparsity, evaluation, or another word for what is sent.
    unit, relation: the neighbouring datasets that the guarantee speaks of: one site's whole data, all samples
    of one patient there or one training sample, added/removed or replaced by another.
    mechanism: "discrete_gaussian" is a sum of discrete Gaussians, whose noise_multiplier is that of a
    Gaussian which costs as much at every Renyi order; "gaussian" has noise_multiplier (standard deviation
    over sensitivity), Poisson sample_rate and steps, and composes through an accountant; "stated" has the
    (epsilon, delta) that its own proof gives, such as Laplace noise or randomised response; "unprotected"
    leaves in the clear and costs an infinite epsilon.
    trusts_server: the noise is added by the server, so against the server itself there is no guarantee.
    seeded: of a release before 0.3 alone, whose noise the recipient could repeat from a seed: it hid nothing.
    part: "SCOPE/NAME": a part of the data, such as one task's, that shares no sample with the other parts of
    the same scope, which is one run of one experiment; of a scope's entries that differ in it alone, a sample
    is in one, and pays for the dearest. Parts of different scopes may hold the same samples. '' is all data.
    records: keyed hash of the set of records of that part (privacy/record_book.py).
    Raises PrivacyError when the numbers do not fit the mechanism.
    """

    run: str
    experiment: str
    recipient: str
    kind: str
    unit: Unit
    relation: Relation
    mechanism: Mechanism
    noise_multiplier: float | None = None
    sample_rate: float | None = None
    steps: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    trusts_server: bool = False
    seeded: bool = False
    part: str = ""
    records: str = ""
    note: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        for name, words in _ALLOWED.items():
            if getattr(self, name) not in words:
                raise PrivacyError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(words)}")
        gaussian = (self.noise_multiplier, self.sample_rate, self.steps)
        stated = (self.epsilon, self.delta)
        unused = {"stated": gaussian, "unprotected": gaussian + stated}.get(self.mechanism, stated)
        if any(value is not None for value in unused):
            raise PrivacyError(
                f"a {self.mechanism} release of kind {self.kind!r} has numbers of another mechanism"
            )
        if self.mechanism in ("gaussian", "discrete_gaussian") and not _is_valid_gaussian(*gaussian):
            raise PrivacyError(
                f"a gaussian release of kind {self.kind!r} has noise_multiplier, sample_rate, steps = "
                f"{gaussian}; allowed: finite and 0 or more, above 0 and at most 1, 1 or more"
            )
        if self.mechanism == "stated" and not _is_valid_stated(*stated):
            raise PrivacyError(
                f"a stated release of kind {self.kind!r} has epsilon, delta = {stated}; "
                "allowed: finite and 0 or more, at least 0 and below 1"
            )

    @classmethod
    def of_update(
        cls,
        privacy: PrivacyConfig,
        *,
        run: str,
        experiment: str,
        recipient: str,
        sample_rate: float = 1.0,
        steps: int = 1,
    ) -> Self:
        """The entry for one model update under the experiment's privacy block.

        sample_rate, steps: of this round's DP-SGD in mode sample; the client modes
        release once, without amplification.
        """
        sent: dict[str, Any] = {"run": run, "experiment": experiment, "recipient": recipient}
        sent["kind"] = "update"
        if privacy.mode == "none" or privacy.noise_multiplier is None:
            return cls(**sent, unit="site", relation="replace", mechanism="unprotected")
        # it imports PyTorch, for which no command that reads a ledger or a status should wait
        from perennial.privacy.protection import compute_effective_multiplier

        once = privacy.mode != "sample"
        return cls(
            **sent,
            unit=privacy.hidden_unit or "site",
            relation="replace" if privacy.mode == "client_local" else "add_remove",
            mechanism="discrete_gaussian" if privacy.shared else "gaussian",
            noise_multiplier=compute_effective_multiplier(privacy.mode, privacy.noise_multiplier),
            sample_rate=1.0 if once else sample_rate,
            steps=1 if once else steps,
            trusts_server=privacy.mode == "client_central",
        )

    @classmethod
    def of_sums(cls, privacy: PrivacyConfig, *, run: str, experiment: str, recipient: str, task: int) -> Self:
        """The entry for one task's sums of features: one release, of the task's samples alone."""
        entry = cls.of_update(privacy, run=run, experiment=experiment, recipient=recipient)
        part = "" if entry.mechanism == "unprotected" else f"{experiment[:32]}.{run}/task {task}"
        return replace(entry, kind="statistics", part=part)

    @property
    def scope(self) -> str:
        """The run of whose parts a sample is in one; '' for a release that every sample pays."""
        return self.part.rpartition("/")[0] if self.unit == "sample" else ""

    @property
    def protected(self) -> bool:
        """Whether the release hides anything from its recipient."""
        return self.mechanism != "unprotected" and not self.seeded

    def to_json(self) -> dict[str, Any]:
        """The fields that say something; JSON-safe, for no release stores an infinite number."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if not (value is None or value is False or value == "")
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The entry of a parsed line. Raises PrivacyError on a missing, unknown or mistyped field."""
        known = {field.name: field.type for field in fields(cls)}
        texts = ("run", "experiment", "recipient", "kind", "unit", "relation", "mechanism")
        if not set(texts) <= set(values) <= set(known):
            raise PrivacyError(
                f"fields {sorted(values)}; expected {sorted(texts)} and the mechanism's numbers"
            )
        for name, value in values.items():
            number = name in ("noise_multiplier", "sample_rate", "epsilon", "delta", "steps")
            fits = (
                isinstance(value, int if name == "steps" else int | float) and not isinstance(value, bool)
                if number
                else isinstance(value, bool if name in ("trusts_server", "seeded") else str)
            )
            if not fits:
                raise PrivacyError(f"field {name} is {value!r}, which is not of its type")
        return cls(**values)


def _is_valid_gaussian(noise_multiplier: float | None, sample_rate: float | None, steps: int | None) -> bool:
    if noise_multiplier is None or sample_rate is None or steps is None:
        return False
    return 0 <= noise_multiplier < math.inf and 0 < sample_rate <= 1 and steps >= 1


def _is_valid_stated(epsilon: float | None, delta: float | None) -> bool:
    return epsilon is not None and delta is not None and 0 <= epsilon < math.inf and 0 <= delta < 1
