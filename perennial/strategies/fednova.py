"""FedNova: normalises updates by the work that went into them.

A site with more local steps then does not pull the optimum towards itself. Wang et al. 2020 (arXiv
2007.07481).
"""

import math
from dataclasses import replace

from torch import Tensor

from perennial.config.charges import count_round_steps
from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.strategies.fedavg import FedAvg, WeightedMean
from perennial.strategies.round.context import Aggregator, RoundContext, RunContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.sums.exact_sum import is_statistic

MAX_STEPS = 1_000_000


def accumulate_weight(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """L1 norm of the weights that local gradients have in an update: how many plain steps it is worth.

    pull: step size times FedProx's mu. Plain SGD: steps. Momentum rho: (s - rho (1 - rho^s) / (1 - rho)) /
    (1 - rho). Proximal: (1 - (1 - pull)^s) / pull.
    """
    # the update's answer to one gradient k steps before its end; with strong momentum and pull it swings
    # through zero, and a signed sum would count it as no work
    work, answer, velocity = 0.0, 0.0, 0.0
    for step in range(steps):
        velocity = momentum * velocity + (step == 0) - pull * answer
        answer += velocity
        work += abs(answer)
    return work


class FedNova(FedAvg):
    """theta + tau_eff sum_k p_k update_k / A_k, p_k = n_k / n, tau_eff = sum_k p_k A_k.

    A_k is accumulate_weight() of the site's steps under the experiment's local SGD; for Adam, which has no
    closed form, it is the number of steps. Equal A_k give FedAvg. A site that does not report its steps is
    dropped; one whose samples allow other steps counts as these allow, and is named. Running statistics are
    averaged as in FedAvg.
    """

    asks = ASKS["fednova"]
    _momentum = 0.0
    _pull = 0.0

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError if lr * mu of FedProx is 1 or more: steps would pass the anchor."""
        super().attach(run)
        learner = run.experiment.learner
        if learner.optimizer.name != "sgd":
            return
        self._momentum = learner.optimizer.momentum
        self._pull = learner.optimizer.lr * (learner.correction.mu if learner.correction else 0.0)
        if self._pull >= 1:
            raise ConfigError(
                f"learner.correction.mu: times learner.optimizer.lr it is {self._pull:g}; "
                "fednova allows a product below 1"
            )

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return NormalisedMean(ctx, self)

    def work_of(self, steps: int) -> float:
        """The number of plain SGD steps that this many local steps are worth."""
        return accumulate_weight(steps, self._momentum, self._pull)

    def bound_steps(self, samples: int) -> tuple[int, int]:
        """The (fewest, most) local steps that the experiment makes of this many samples."""
        learner, privacy = self.run.experiment.learner, self.run.experiment.privacy
        if privacy.mode == "sample":
            steps = count_round_steps(learner, privacy)
            return steps, steps
        # batch normalisation leaves out a last batch of one sample
        fewest, most = (max(1, math.ceil(n / learner.batch_size)) for n in (samples - 1, samples))
        return learner.epochs * fewest, learner.epochs * most


class NormalisedMean(WeightedMean):
    """The mean of updates divided by each site's work, times the work of all."""

    def __init__(self, ctx: RoundContext, method: FedNova) -> None:
        super().__init__(ctx, method)
        self._work_of, self._bound_steps, self._work = method.work_of, method.bound_steps, list[float]()

    def add(self, reply: Admitted) -> None:
        if not self.ctx.by_curriculum and not reply.steps:
            raise ConfigError(
                "strategy FedNova: needs the number of local steps, and a reply of another ClientApp tells "
                "none; allowed: `num-steps` beside `num-examples` in its MetricRecord"
            )
        if not 1 <= reply.steps <= MAX_STEPS:
            raise Rejected(f"steps: found {reply.steps}; fednova needs the number of local steps, from 1")
        fewest = most = reply.steps
        if self.ctx.by_curriculum and not reply.stand_in:
            fewest, most = self._bound_steps(reply.num_examples)
        # too few would lengthen the site's own part; too many shorten that alone, if they lengthen no other's
        divided = max(reply.steps, fewest)
        counted = min(divided, most)
        work = self._work_of(divided)
        update = {
            name: tensor if is_statistic(name) else tensor / work for name, tensor in reply.update.items()
        }
        super().add(replace(reply, update=update))
        self._work.append(reply.num_examples * (work if counted == divided else self._work_of(counted)))
        if counted != reply.steps:
            self.ctx.outcome.warnings.append(
                f"site {reply.site}: has {reply.steps} local steps, and counts as {counted} (its samples "
                f"allow {fewest} to {most})"
            )

    def result(self) -> dict[str, Tensor]:
        total, samples = self.sum.value(), self.sum.weight
        effective_steps = math.fsum(self._work) / samples
        return {
            name: (tensor + total[name] * ((1.0 if is_statistic(name) else effective_steps) / samples)).to(
                tensor.dtype
            )
            for name, tensor in self.ctx.reference.items()
        }
