"""The model of the task before: sites that do not hold it get it with their request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perennial.protocol.tensors import Tensors


@dataclass(frozen=True)
class PreviousModel:
    """The previous task's model, and who holds it.

    sha256, arrays: of the complete model; empty in task 1, and if no site needs it.
    holders: names of the sites that are known to hold it.
    """

    sha256: str = ""
    arrays: Mapping[str, Tensor] | None = None
    holders: frozenset[str] = frozenset()

    def fields(self, *, held: bool) -> dict[str, Any]:
        """What a request says of it: `previous`, and `previous_arrays` unless the site holds it."""
        send = self.arrays is not None and not held
        return {"previous": self.sha256, "previous_arrays": Tensors(self.arrays or {}) if send else None}

    def fields_of(self, site: str) -> dict[str, Any]:
        """As fields, for one site."""
        return self.fields(held=site in self.holders)

    def fields_for(self, sites: Iterable[str]) -> list[tuple[list[str], dict[str, Any]]]:
        """(sites, what their requests say of it): those that hold it, then the others."""
        held: dict[bool, list[str]] = {}
        for site in sites:
            held.setdefault(self.arrays is None or site in self.holders, []).append(site)
        return [(held[key], self.fields(held=key)) for key in (True, False) if key in held]
