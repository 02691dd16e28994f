"""The types of what a site sends in a private run: public, or released under a mechanism that is charged.

A value gets the type `Released` with the mechanism that hides a unit in it. The mechanism's `std` sizes the
noise and its `entry` is charged, so that the two cannot differ. client/release.py is the one exit: it charges
what is released, and refuses a value that has neither type.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from perennial.foundation.errors import PrivacyError
from perennial.privacy.entries import Entry

T = TypeVar("T")
U = TypeVar("U")
Plain = str | int | float | bool
"""What a public value may be, or a list of it: no tensor and no mapping."""


@dataclass(frozen=True, eq=False)
class Mechanism:
    """What hides one unit in a value.

    Each object is one release: all fields of a reply that name the same object leave for one charge.

    Attributes:
        entry: the charge, whose noise_multiplier is the standard deviation over `sensitivity`.
        sensitivity: L2 distance by which one unit moves the value before noise; infinite without a bound.
        paid: one item for each charge that was made before the data were read; it is good for one release.
    """

    entry: Entry
    sensitivity: float = math.inf
    paid: list[None] = field(default_factory=list[None], repr=False)

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the value."""
        assert self.entry.noise_multiplier is not None
        return self.entry.noise_multiplier * self.sensitivity

    @property
    def in_the_clear(self) -> bool:
        """Whether there is no noise at all."""
        return self.entry.mechanism == "unprotected"

    def require(self, std: float) -> None:
        """Raises PrivacyError where noise of this standard deviation is less than what is charged for."""
        if not std >= self.std * (1 - 1e-12):
            raise PrivacyError(
                f"{self.entry.kind}: noise of standard deviation {std:g}, and {self.std:g} is charged for; "
                "nothing left the site"
            )

    def within(self, sensitivity: float) -> Self:
        """The same mechanism where the bound is known from the value's public shape alone."""
        return replace(self, sensitivity=sensitivity)

    def add_note(self, note: str) -> Self:
        """The same mechanism, with a note in the ledger."""
        return replace(self, entry=replace(self.entry, note=note))


@dataclass(frozen=True)
class Public(Generic[T]):
    """A value that follows from the request, the experiment and the site's policy alone."""

    value: T

    def __post_init__(self) -> None:
        held: Any = self.value
        for item in held if isinstance(held, list | tuple) else (held,):
            if not isinstance(item, Plain):
                raise PrivacyError(
                    f"a public value is a {type(item).__name__}; allowed: numbers, texts and lists of them"
                )


class Released(Generic[T]):
    """A value as it may leave, and the mechanisms that hide a unit in it."""

    def __init__(self, value: T, *mechanisms: Mechanism) -> None:
        """Raises PrivacyError without a mechanism: `Public` is for what depends on no data."""
        if not mechanisms:
            raise PrivacyError("a released value has no mechanism, so that nothing would be charged for it")
        self.value, self.mechanisms = value, mechanisms

    def alike(self, value: U) -> "Released[U]":
        """Another form of the same value, or one that leaves with it, for the same charge."""
        return Released(value, *self.mechanisms)
