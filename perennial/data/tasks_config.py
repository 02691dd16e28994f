"""The `tasks` block of an experiment: how its classes become tasks, and how long each is trained."""

import operator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from perennial.data.class_names import Names
from perennial.foundation.block import FiniteBlock
from perennial.foundation.errors import nearest

Rounds = Annotated[int, Field(gt=0, le=1_000_000)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
_ORDERS = ("seeded", "natural", "1993")


def _order(value: Any) -> Any:
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, str) and value not in _ORDERS:
        hint = nearest(value, _ORDERS)
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
    def _one_way_to_cut(self) -> Self:
        if (self.count is None) == (self.increments is None):
            found = "neither" if self.count is None else "both"
            raise ValueError(f"give exactly one of count and increments; found {found}")
        return self
