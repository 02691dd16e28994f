"""Opacus's accountants without the rest of Opacus.

A site starts one process for each message and asks its ledger what a release would cost. There `import
opacus` takes seconds: it brings distributed optimizers and per-layer samplers that accounting never calls.
The folder opacus/accountants needs NumPy and SciPy only, except that its abstract base class names an
optimizer type. So this module opens the folder as a package of its own, with a base class that keeps the
history and nothing else. The mathematics stays Opacus's. A test holds the figures equal to those of the full
import of Opacus.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "opacus_accountants_alone"


class _History:
    """What Opacus's accountants inherit: (noise multiplier, sample rate, steps) of each mechanism."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []


@cache
def accountant_class(name: str) -> Any:
    """Opacus's RDPAccountant ("rdp") or PRVAccountant ("prv"), imported on first use.

    Raises ImportError when Opacus is not installed.
    """
    if _PACKAGE not in sys.modules:
        spec = find_spec("opacus")
        if spec is None or spec.origin is None:
            raise ImportError("privacy accounting needs Opacus (`pip install opacus`)")
        package, base = ModuleType(_PACKAGE), ModuleType(f"{_PACKAGE}.accountant")
        package.__path__ = [str(Path(spec.origin).parent / "accountants")]
        vars(base)["IAccountant"] = _History
        sys.modules[_PACKAGE], sys.modules[base.__name__] = package, base
    return getattr(import_module(f"{_PACKAGE}.{name}"), f"{name.upper()}Accountant")


def renyi_at(order: float, noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """Renyi divergence at one order of so many Poisson-sampled Gaussian releases."""
    accountant_class("rdp")
    rdp = import_module(f"{_PACKAGE}.analysis.rdp")
    settings = {"q": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    return float(rdp.compute_rdp(**settings, orders=float(order)))
