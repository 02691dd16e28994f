"""Names that a person writes: of classes, categories and sites."""

from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, Field


def _printable(name: str) -> str:
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} is not a name: empty, or with a space at an end, or not printable")
    return name


def _distinct(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    twice = sorted(name for name, count in Counter(names or ()).items() if count > 1)
    if twice:
        raise ValueError(f"listed more than once: {', '.join(twice)}")
    return names


Name = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_printable)]
Names = Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_distinct)]
