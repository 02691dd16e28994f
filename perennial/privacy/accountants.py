"""What a sequence of Gaussian releases costs: epsilon for a delta, by RDP or by PRV.

Both are upper bounds for adaptively chosen inputs. The figures are Opacus's; here they get one interface, one
order of composition, and a fallback where the numerical one cannot answer.

Mironov 2017 (arXiv 1702.07476), Mironov et al. 2019 (arXiv 1908.10530): RDP. Gopi et al. 2021 (arXiv
2106.02848): PRV.
"""

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from perennial.foundation.errors import PrivacyError, suggest_nearest
from perennial.privacy.config import AccountantName

ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 64, 80, 96, 128, 160, 192, 256, 384, 512]

# Above this PRV's grid no longer fits float64 and memory, and no such figure is a protection.
_LARGEST_NUMERICAL_EPSILON = 300.0


class Accountant(ABC):
    """Composition of Gaussian mechanisms, each Poisson sampled with its own rate.

    A rate of 1 is the plain Gaussian. The order of releases does not matter, so equal settings are kept
    together: history[(noise_multiplier, sample_rate)] = steps.
    """

    name: ClassVar[AccountantName]

    def __init__(self, history: Iterable[tuple[float, float, int]] = ()) -> None:
        self._steps: dict[tuple[float, float], int] = {}
        for noise_multiplier, sample_rate, steps in history:
            self.step(noise_multiplier, sample_rate, steps)

    def step(self, noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1) -> None:
        """Add steps releases with noise of standard deviation noise_multiplier * sensitivity.

        Raises PrivacyError on a negative or non-finite multiplier, a rate outside (0, 1] or steps below 1.
        """
        if not 0 <= noise_multiplier < math.inf:
            raise PrivacyError(f"noise multiplier is {noise_multiplier}; allowed: a finite number, 0 or more")
        if not 0 < sample_rate <= 1:
            raise PrivacyError(f"sample rate is {sample_rate}; allowed: above 0, at most 1")
        if steps < 1:
            raise PrivacyError(f"steps is {steps}; allowed: 1 or more")
        setting = (noise_multiplier, sample_rate)
        self._steps[setting] = self._steps.get(setting, 0) + steps

    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) of each setting: JSON-able, enough to build the same one."""
        return [(noise, rate, steps) for (noise, rate), steps in sorted(self._steps.items())]

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon for all steps together: 0 without steps, infinite where one had no noise.

        Raises PrivacyError when delta is outside (0, 1).
        """
        if not 0 < delta < 1:
            raise PrivacyError(f"delta is {delta}; allowed: above 0, below 1")
        if not self._steps:
            return 0.0
        if any(noise == 0 for noise, _ in self._steps):
            return math.inf
        return max(0.0, self._bound(delta))

    @abstractmethod
    def _bound(self, delta: float) -> float: ...


class RdpAccountant(Accountant):
    """Renyi DP, converted by Balle et al. 2020 (arXiv 1905.09982): quick, about a tenth above PRV."""

    name = "rdp"

    def _bound(self, delta: float) -> float:
        opacus = load_accountant_class("rdp")()
        opacus.history = self.history()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Optimal order is the")
            return float(opacus.get_epsilon(delta, alphas=ORDERS))


class PrvAccountant(RdpAccountant):
    """Numerical composition of privacy loss variables, tight to 0.01.

    Where the grid cannot carry it (epsilon in the hundreds, a delta near float64's end) the RDP bound stands;
    where 0.01 is coarse (epsilon in the hundredths) the smaller of the two does. Both are upper bounds.
    """

    name = "prv"

    def _bound(self, delta: float) -> float:
        import numpy as np

        rdp = super()._bound(delta)
        if rdp > _LARGEST_NUMERICAL_EPSILON:
            return rdp
        opacus = load_accountant_class("prv")()
        opacus.history = self.history()
        try:
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                numerical = float(opacus.get_epsilon(delta))
        except (RuntimeError, ValueError, MemoryError):
            return rdp
        return min(rdp, numerical) if math.isfinite(numerical) else rdp


_ACCOUNTANTS: dict[str, type[Accountant]] = {"rdp": RdpAccountant, "prv": PrvAccountant}


def make_accountant(name: str, history: Iterable[tuple[float, float, int]] = ()) -> Accountant:
    """The accountant of that name, with a history to go on from. Raises PrivacyError on an unknown name."""
    if name not in _ACCOUNTANTS:
        raise PrivacyError(
            f"accountant is {name!r}; allowed: {', '.join(_ACCOUNTANTS)}{suggest_nearest(name, _ACCOUNTANTS)}"
        )
    return _ACCOUNTANTS[name](history)


def solve_gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Least standard deviation over L2 sensitivity of one Gaussian release with (epsilon, delta).

    The analytic Gaussian mechanism, exact for every epsilon > 0, where the textbook sqrt(2 ln(1.25 / delta))
    / epsilon holds below 1 only. Rounded up.
    Raises PrivacyError when epsilon is not above 0 or delta is outside (0, 1).

    Balle and Wang 2018 (arXiv 1805.06530), theorem 8.
    """
    from scipy.special import log_ndtr, ndtr

    if not 0 < epsilon < math.inf or not 0 < delta < 1:
        raise PrivacyError(
            f"epsilon {epsilon}, delta {delta}; allowed: a finite number above 0, above 0 and below 1"
        )

    def compute_delta(multiplier: float) -> float:
        half, shift = 1 / (2 * multiplier), epsilon * multiplier
        return float(ndtr(half - shift) - math.exp(epsilon + float(log_ndtr(-half - shift))))

    low, high = 1e-6, 1.0
    while compute_delta(high) > delta:
        low, high = high, 2 * high
    while high > low * (1 + 1e-9):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_delta(middle) > delta else (low, middle)
    return high


def compute_digest_l2_sensitivity(bound: float, largest_weight: float, non_negative: bool) -> float:
    """L2 change of a mixed digest when one sample is replaced, its features clipped to L2 norm bound.

    largest_weight: of one sample in its mixture, 1 / samples per digest when balanced. A sample lies in one
    digest, so one digest changes. non_negative: features after a ReLU, of which two are at most sqrt(2) *
    bound apart. Hsu et al. 2022 (arXiv 2210.00737), with the sensitivity of what is really released.
    """
    return (math.sqrt(2) if non_negative else 2) * bound * largest_weight


def compute_digest_l1_sensitivity(length: int, largest_value: float, largest_weight: float) -> float:
    """L1 change of a mixed digest of length features in [0, largest_value], when one sample is replaced."""
    return length * largest_value * largest_weight


def compute_sparsity_l2_sensitivity(channels: int) -> float:
    """L2 change of (sum of vectors in [0, 1]^channels, their number) by one sample more, less or replaced."""
    return math.sqrt(channels + 1)


_PACKAGE = "opacus_accountants_alone"


class _History:
    """What Opacus's accountants inherit: (noise multiplier, sample rate, steps) of each mechanism."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []


@cache
def load_accountant_class(name: str) -> Any:
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


def compute_renyi(order: float, noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """Renyi divergence at one order of so many Poisson-sampled Gaussian releases."""
    load_accountant_class("rdp")
    rdp = import_module(f"{_PACKAGE}.analysis.rdp")
    settings = {"q": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    return float(rdp.compute_rdp(**settings, orders=float(order)))
