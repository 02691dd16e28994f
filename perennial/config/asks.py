"""What a method asks of a site beside plain training: data, by which a site checks requests."""

from typing import Any, Literal

from pydantic import Field

from perennial.foundation.block import Block, FiniteBlock
from perennial.foundation.errors import PolicyRefusal

Measurement = Literal[
    "held_out_accuracy", "train_accuracy", "classification_loss", "class_coverage", "label_counts"
]
"""Names of protocol/measurements.py."""
Scalar = str | bool | int | float | None


class Between(FiniteBlock):
    """Numbers from `least` to `most`, both allowed."""

    least: float
    most: float

    def admits(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


class OneOf(Block):
    """The values that a setting may have."""

    values: tuple[Scalar, ...] = Field(min_length=1)

    def admits(self, value: Any) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in self.values)

    def __str__(self) -> str:
        return ", ".join(repr(value) for value in self.values)


class Asks(Block):
    """Everything that requests of a method may ask of a site beside an update of the model.

    site_half: a plug-in has a half that sites run, the attribute `site_half` of its class.
    measurements: figures that a site may be asked to report beside its update.
    settings: dotted key of a request's settings -> values that it may have; None: whatever the site's own
    check of the key admits. A first part that no key has is refused.
    statistics: sums of fixed features in place of training.
    counts_alike: updates are not multiplied by the number of samples.
    clear_uploads: names of what replies carry without noise, beside what is measured.
    single_updates: why the server needs the update of each site in the clear; "": a sum is enough.
    """

    site_half: bool = False
    measurements: tuple[Measurement, ...] = ()
    settings: dict[str, Between | OneOf | None] = Field(default_factory=dict)
    statistics: bool = False
    counts_alike: bool = False
    clear_uploads: tuple[str, ...] = ()
    single_updates: str = "it needs the update of each site in the clear"

    def check_settings(self, content: dict[str, Any]) -> None:
        """Raises PolicyRefusal naming the first key of a request's settings whose value is not allowed."""
        for key, allowed in self.settings.items():
            value: Any = content
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if allowed is not None and value is not None and not allowed.admits(value):
                raise PolicyRefusal(
                    f"settings.{key}: found {value!r:.40}, in the approved experiment {allowed}"
                )

    @property
    def setting_keys(self) -> frozenset[str]:
        """First parts of the dotted keys that a request's settings may have."""
        return frozenset(key.partition(".")[0] for key in self.settings)
