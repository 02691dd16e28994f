"""FedDyn: bends every site's objective so that the sites' optima agree with the federation's.

Acar et al. 2021 (arXiv 2111.04263).
"""

from typing import Any

from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.strategies.round.corrected import Corrected
from perennial.strategies.round.gate import Admitted
from perennial.strategies.sums.exact_sum import ExactSum
from perennial.strategies.sums.parameters import is_statistic


class FedDyn(Corrected):
    """mean of the sites' models + (1/N) sum of all updates ever, N sites in the population.

    alpha: strength of the sites' dynamic regulariser. memory is the server's h divided by alpha. It never
    decays, so a site that leaves for good keeps pulling: the method is known to diverge then.
    """

    asks = ASKS["feddyn"]
    needs = "the dynamic regulariser in the sites' steps"

    def __init__(self, alpha: float = 0.1, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(max_update_norm, **flower)
        if not alpha > 0:
            raise ValueError(f"alpha: found {alpha}, allowed above 0")
        self.alpha = alpha

    def correction(self) -> dict[str, Any]:
        return {"name": "feddyn", "alpha": self.alpha}

    def begin_round(self) -> None:
        super().begin_round()
        self._stand_ins: ExactSum | None = None

    def fold(self, reply: Admitted) -> None:
        super().fold(reply)
        if reply.stand_in:
            # the absent site's own vector has not moved, and the server's must agree with it
            self._stand_ins = self._stand_ins or ExactSum(self.reference, self.sum_grid())
            self._stand_ins.add(reply.update, 1.0, reply.norm)

    def moved(self) -> dict[str, Tensor]:
        total = self._sum.value()
        mean = self._sum.added_to(self.reference)
        not_theirs = self._stand_ins.value() if self._stand_ins is not None else {}
        for name, kept in self.memory.items():
            own = total[name] - not_theirs[name] if not_theirs else total[name]
            kept.sub_((own / len(self.population)).to(kept.dtype))
        return {
            name: tensor if is_statistic(name) else tensor - self.memory[name]
            for name, tensor in mean.items()
        }
