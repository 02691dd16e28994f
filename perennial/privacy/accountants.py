"""What a sequence of Gaussian releases costs: epsilon for a delta, by RDP or by PRV.

Both are upper bounds for adaptively chosen inputs. The figures are Opacus's; here they get one interface, one
order of composition, and a fallback where the numerical one cannot answer.

Mironov 2017 (arXiv 1702.07476), Mironov et al. 2019 (arXiv 1908.10530): RDP. Gopi et al. 2021 (arXiv
2106.02848): PRV.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from perennial.foundation.errors import PrivacyError, nearest
from perennial.privacy.config import AccountantName
from perennial.privacy.opacus_accounting import accountant_class

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
        opacus = accountant_class("rdp")()
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
        opacus = accountant_class("prv")()
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
            f"accountant is {name!r}; allowed: {', '.join(_ACCOUNTANTS)}{nearest(name, _ACCOUNTANTS)}"
        )
    return _ACCOUNTANTS[name](history)
