"""The `tasks` block and data.partition: how classes become tasks, and how sites share samples."""

import operator
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from perennial.foundation.errors import suggest_nearest
from perennial.foundation.plain import FiniteBlock


def _check_name(name: str) -> str:
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} is not a name: empty, or with a space at an end, or not printable")
    return name


def _check_distinct(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    twice = sorted(name for name, count in Counter(names or ()).items() if count > 1)
    if twice:
        raise ValueError(f"listed more than once: {', '.join(twice)}")
    return names


Name = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_check_name)]
Names = Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_check_distinct)]


Rounds = Annotated[int, Field(gt=0, le=1_000_000)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
_ORDERS = ("seeded", "natural", "1993")


def _order(value: Any) -> Any:
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, str) and value not in _ORDERS:
        hint = suggest_nearest(value, _ORDERS)
        raise ValueError(
            f"must be {', '.join(_ORDERS)} or the list of all class names; found {value!r}{hint}"
        )
    return value


class TasksConfig(FiniteBlock):
    """How the registry is cut into tasks, and how long each is trained.

    count: that many tasks of (nearly) equal size, larger ones first.
    increments: classes of each task, or one number for all.
    rounds: rounds of each task, or one number for all.
    learnt: tasks that the run had learnt before it was continued; written by `--resume`. Their classes need
        no samples any more, but for what the learner replays.
    """

    count: PositiveInt | None = None
    increments: PositiveInt | Sizes | None = None
    order: Annotated[Literal["seeded", "natural", "1993"] | Names, BeforeValidator(_order)] = "seeded"
    rounds: Rounds | Annotated[tuple[Rounds, ...], Field(min_length=1)]
    learnt: int = Field(default=0, ge=0, exclude_if=operator.not_)

    @model_validator(mode="after")
    def _check_cut(self) -> Self:
        if (self.count is None) == (self.increments is None):
            found = "neither" if self.count is None else "both"
            raise ValueError(f"give exactly one of count and increments; found {found}")
        return self


PartitionKind = Literal["iid", "dirichlet", "class_subset", "natural", "groups"]
_PARTITION_OF: dict[str, PartitionKind] = {
    "alpha": "dirichlet",
    "min_samples": "dirichlet",
    "classes_per_site": "class_subset",
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
    classes_per_site: PositiveInt | Literal["disjoint"] | None = None
    groups: PositiveInt | None = None
    shared_classes: PositiveInt | None = None
    own_classes: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key, kind in _PARTITION_OF.items():
            if self.is_set(key) and self.kind != kind:
                raise ValueError(f"{key} belongs to kind {kind!r}; found kind {self.kind!r}")
        for key in ("alpha", "classes_per_site", "groups", "shared_classes"):
            if self.kind == _PARTITION_OF[key] and not self.is_set(key):
                raise ValueError(f"kind {self.kind!r} needs {key}")
        return self
