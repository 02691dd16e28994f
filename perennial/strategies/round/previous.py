"""The model of the task before: sites that do not hold it get it with their request."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perennial.protocol.tensors import Tensors


@dataclass(frozen=True)
class PreviousModel:
    """The previous task's model, and the sites that hold it.

    sha256, read: of the complete model, which stays on the disk; empty in task 1, and if no site needs it.
    holders: names of the sites that are known to hold it.
    """

    sha256: str = ""
    read: Callable[[], Mapping[str, Tensor] | None] = lambda: None
    holders: frozenset[str] = frozenset()

    def fields(self, *, held: bool) -> dict[str, Any]:
        """A request's fields about the model: `previous`, and `previous_arrays` unless the site holds it."""
        arrays = None if held else self.read()
        return {"previous": self.sha256, "previous_arrays": None if arrays is None else Tensors(arrays)}

    def fields_of(self, site: str) -> dict[str, Any]:
        """The fields of a request to this site."""
        return self.fields(held=site in self.holders)

    def fields_for(self, sites: Iterable[str]) -> list[tuple[list[str], dict[str, Any]]]:
        """(sites, fields of their requests), for sites that hold the model and for those that do not."""
        held: dict[bool, list[str]] = {}
        for site in sites:
            held.setdefault(not self.sha256 or site in self.holders, []).append(site)
        return [(held[key], self.fields(held=key)) for key in (True, False) if key in held]
