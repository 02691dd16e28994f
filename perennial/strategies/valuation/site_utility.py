"""The worth of a model by the sites' own held-out samples, for a server that has none."""

from statistics import median

from flwr.serverapp import Grid

from perennial.foundation.errors import ConfigError
from perennial.learning.site_method import PlannedRun, SiteMethod
from perennial.learning.worth import Worth
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import ask, check_counts
from perennial.strategies.round.request import Arrays, RoundRequest
from perennial.strategies.round.run_context import RunContext


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
        for sites, fields in request.previous.fields_for(request.sites):
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


def site_judge(services: RunContext, estimator: str, utility: str) -> SiteJudge:
    """The judge of models if the server has no samples. Raises ConfigError if sites cannot measure either."""
    if services.experiment.evaluation.noise_multiplier is not None:
        raise ConfigError(
            "strategy: contribution found no held-out samples at the server, and would have every site count "
            "with noise after each turn; allowed with data.test_fraction above 0 and evaluation.central true"
        )
    if estimator != "online" or utility != "accuracy" or not services.experiment.evaluation.federated:
        raise ConfigError(
            f"strategy: contribution found no held-out samples at the server, estimator {estimator!r}, "
            f"utility {utility!r} and evaluation.federated "
            f"{str(services.experiment.evaluation.federated).lower()}; allowed with data.test_fraction "
            "above 0 and evaluation.central true, or, measured by the sites, with online, accuracy and true"
        )
    return SiteJudge()
