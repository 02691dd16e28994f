"""The `partition` of the `data` block: how samples are divided among simulated sites."""

import math
from typing import Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from perennial.foundation.block import FiniteBlock

PartitionKind = Literal["iid", "dirichlet", "class_subset", "quantity", "natural", "groups"]
_PARTITION_OF: dict[str, PartitionKind] = {
    "alpha": "dirichlet",
    "min_samples": "dirichlet",
    "balance": "dirichlet",
    "classes_per_site": "class_subset",
    "ratios": "quantity",
    "groups": "groups",
    "shared_classes": "groups",
    "own_classes": "groups",
}


class PartitionConfig(FiniteBlock):
    """How the training samples are divided among simulated sites, task by task.

    groups: so many groups of sites; a site holds the shared_classes of its group and own_classes of others.
    """

    kind: PartitionKind = "iid"
    alpha: float | None = Field(default=None, gt=0)
    min_samples: int = Field(default=10, ge=0)
    balance: bool = False
    classes_per_site: PositiveInt | Literal["disjoint"] | None = None
    ratios: tuple[float, ...] | None = None
    groups: PositiveInt | None = None
    shared_classes: PositiveInt | None = None
    own_classes: int = Field(default=0, ge=0)

    @field_validator("ratios")
    @classmethod
    def _ratios_divide_a_whole(cls, ratios: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if ratios is None or (min(ratios, default=0) > 0 and math.isclose(sum(ratios), 1, abs_tol=1e-6)):
            return ratios
        raise ValueError(f"must be positive and sum to 1; found {list(ratios)}, sum {sum(ratios):g}")

    @model_validator(mode="after")
    def _options_fit_the_kind(self) -> Self:
        for key, kind in _PARTITION_OF.items():
            if self.is_set(key) and self.kind != kind:
                raise ValueError(f"{key} belongs to kind {kind!r}; found kind {self.kind!r}")
        for key in ("alpha", "classes_per_site", "ratios", "groups", "shared_classes"):
            if self.kind == _PARTITION_OF[key] and not self.is_set(key):
                raise ValueError(f"kind {self.kind!r} needs {key}")
        return self
