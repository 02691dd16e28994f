"""The worth of a model by the sites' own held-out samples, for a server that has none."""

from dataclasses import dataclass, field
from statistics import median

from flwr.serverapp import Grid

from perennial.foundation.errors import ConfigError
from perennial.learning.scored import Worth
from perennial.learning.site_method import PlannedRun, SiteMethod
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.exchange import Exchange, ask, check_counts
from perennial.strategies.round.request import Arrays, RoundRequest


class JudgingSite(SiteMethod):
    """The site half of contribution: measures the models of a round where the server has no samples."""

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        experiment = plan.experiment
        without = experiment.data.only_at_sites or not experiment.evaluation.central
        if kind != "evaluate" or not without:
            return 0
        sites = experiment.data.sites or experiment.rounds.wait_for or 1
        return max(1, plan.most("train", number)) * sites + 1


class SiteJudge:
    """Asks all sites of a round to measure a model, and takes the median of their accuracies on each class.

    So a site that lies, or a few of those that hold a class, cannot move it far.

    sent: bytes of the models that were sent. failed: site -> why it did not measure, in the latest round.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed: dict[str, str] = {}
        self._exchange = Exchange()

    def __call__(self, grid: Grid, request: RoundRequest, arrays: Arrays) -> Worth | None:
        """Median accuracy on each class; None when no site has measured."""
        requests: list[tuple[str, int, EvaluateRequest]] = []
        for sites, fields in request.previous.group_fields(request.sites):
            message = EvaluateRequest(**request.stamp.stamp_fields, arrays=Tensors(arrays), **fields)
            requests += [(site, request.sites[site], message) for site in sites]
        self.sent += sum(message.tensor_bytes for _, _, message in requests)
        replies = ask(
            grid,
            self._exchange,
            requests,
            EvaluateReply,
            request.deadline,
            self.failed.__setitem__,
            check_counts,
        )
        shares: list[list[float]] = [[] for _ in range(request.stamp.num_classes)]
        for reply in replies.values():
            for label, (correct, total) in enumerate(zip(reply.correct, reply.total, strict=True)):
                if total:
                    shares[label].append(correct / total)
        return [median(found) if found else None for found in shares] if any(shares) else None


def build_site_judge(services: RunContext, utility: str) -> SiteJudge:
    """The judge of models if the server has no samples. Raises ConfigError if sites cannot measure either."""
    if services.experiment.evaluation.noise_multiplier is not None:
        raise ConfigError(
            "strategy: contribution found no held-out samples at the server, and would have every site count "
            "with noise after each turn; allowed with data.test_fraction above 0 and evaluation.central true"
        )
    if utility != "accuracy" or not services.experiment.evaluation.federated:
        raise ConfigError(
            f"strategy: contribution found no held-out samples at the server, utility {utility!r} and "
            f" evaluation.federated "
            f"{str(services.experiment.evaluation.federated).lower()}; allowed with data.test_fraction "
            "above 0 and evaluation.central true, or, measured by the sites, with accuracy and true"
        )
    return SiteJudge()


NULL_UPDATE = 1e-8
"""Norm of an update as a share of the model's, below which the update counts as zero."""
NULL_UPDATES = 5
"""Updates after which a site whose every update was zero is flagged."""


@dataclass(frozen=True)
class NullUpdates:
    """Counts of zero updates. counts: site -> [updates that were zero, all of its updates]."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def count(self, site: str, null: bool) -> None:
        """Count one update of a site. null: whether it was zero."""
        zero, updates = self.counts.get(site, (0, 0))
        self.counts[site] = [zero + null, updates + 1]

    @property
    def flags(self) -> dict[str, str]:
        """site -> why it is flagged."""
        return {site: "null update" for site, (zero, n) in self.counts.items() if zero == n >= NULL_UPDATES}

    def describe_new_flags(self, before: set[str]) -> list[str]:
        """A sentence for each site that is flagged and was not before."""
        return [
            f"site {site}: flagged ({flag}): every update it sent was zero"
            for site, flag in self.flags.items()
            if site not in before
        ]


EARLIER = 4
"""Rounds of a task that must be known before one of them can be rolled back."""
DEVIATIONS = 3.0
IN_A_ROW = 2
"""Rounds that may be rolled back one after the other, so that a run whose data changed goes on learning."""
NORMAL = 1.4826
"""Standard deviation of a normal law over its median absolute deviation."""


@dataclass
class Rollback:
    """The rule of one run. changes: of the utility, by the rounds of this task that were kept."""

    task: int = 0
    changes: list[float] = field(default_factory=list)
    in_a_row: int = 0
    rounds: int = 0
    """Rounds rolled back in the whole run."""

    def limit(self, error: float) -> float | None:
        """The change of utility below which a round is rolled back; None while too little is known.

        error: standard error of the change, from the held-out samples.
        """
        if len(self.changes) < EARLIER or self.in_a_row >= IN_A_ROW:
            return None
        middle = median(self.changes)
        spread = NORMAL * median(abs(change - middle) for change in self.changes)
        return min(0.0, middle) - DEVIATIONS * (error**2 + spread**2) ** 0.5

    def judge_change(self, task: int, change: float, error: float) -> bool:
        """Whether to roll back a round of this task with this change of utility; notes the answer."""
        if task != self.task:
            self.task, self.changes, self.in_a_row = task, [], 0
        limit = self.limit(error)
        if limit is not None and change < limit:
            self.in_a_row += 1
            self.rounds += 1
            return True
        self.changes.append(change)
        self.in_a_row = 0
        return False
