"""The `digests` block of an experiment: how samples are mixed, and what hides them before they leave."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from perennial.foundation.block import Block

DigestProtection = Literal["none", "paper", "laplace", "gauss"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DigestConfig(Block):
    """What a site releases once for each task, for the server to keep.

    per_digest: samples in one digest. mix: whose features are mixed, any samples' or those of one class.
    weights: of the samples in a digest, None for equal ones.
    protection: "laplace" and "gauss" size their noise by what one sample can change; "paper" is the published
    scale largest / (20000 * epsilon), for reproduction, and its epsilon is not a guarantee.
    largest: public bound of a feature, to which features are cut; "paper" without it takes the largest
    feature of the site, which is itself private. norm: public bound of a sample's L2 norm ("gauss").
    label_epsilon: of the random answer that stands for each label; None sends labels in the clear.
    """

    per_digest: int = Field(default=4, ge=1)
    mix: Literal["random", "within_class"] = "random"
    weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    protection: DigestProtection = "none"
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    largest: Positive | None = None
    norm: Positive | None = None
    label_epsilon: Positive | None = None

    @model_validator(mode="after")
    def _weights_mix(self) -> Self:
        if self.weights is None:
            return self
        if len(self.weights) != self.per_digest or not math.isclose(sum(self.weights), 1, abs_tol=1e-6):
            raise ValueError(
                f"weights: found {list(self.weights)}; allowed {self.per_digest} numbers (per_digest), 0 or "
                "more, that sum to 1"
            )
        return self

    @model_validator(mode="after")
    def _protection_is_complete(self) -> Self:
        needs = {
            "none": (),
            "paper": ("epsilon",),
            "laplace": ("epsilon", "largest"),
            "gauss": ("epsilon", "norm"),
        }
        for key in ("epsilon", "largest", "norm"):
            if key in needs[self.protection] and getattr(self, key) is None:
                raise ValueError(f"{key} is missing: protection {self.protection!r} needs it")
        if self.protection == "none" and self.epsilon is not None:
            raise ValueError("epsilon is set, but protection is none, which adds no noise")
        if self.norm is not None and self.protection != "gauss":
            raise ValueError(f"norm belongs to protection gauss; found {self.protection!r}")
        if self.label_epsilon is not None and self.mix == "within_class":
            raise ValueError("mix within_class groups by the labels that label_epsilon is to hide")
        return self

    @property
    def labels_in_the_clear(self) -> bool:
        """Whether what leaves tells a sample's label without noise."""
        return self.label_epsilon is None

    @property
    def protects(self) -> bool:
        """Whether the noise provably hides one sample's features."""
        return self.protection in ("laplace", "gauss")
