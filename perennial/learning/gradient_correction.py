"""The correction that a strategy adds to the gradient of every local step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GradientCorrection:
    """Changes each gradient to gradient + shift + pull * (parameters - anchor).

    anchor: the model received. shift: (T,) or None. FedProx, FedDyn pull; SCAFFOLD, FedDyn, AdaBest shift.
    """

    shift: Tensor | None = None
    pull: float = 0.0

    def apply(self, gradient: Tensor, parameters: Tensor, anchor: Tensor) -> None:
        """Add the correction to gradient (T,) in place. parameters, anchor: (T,)."""
        if self.shift is not None:
            gradient.add_(self.shift)
        if self.pull:
            gradient.add_(parameters - anchor, alpha=self.pull)
