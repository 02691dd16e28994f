"""What a model is worth by the sites' own held-out samples, for a server that has none."""

from statistics import median

from flwr.serverapp import Grid

from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import ask, check_counts
from perennial.strategies.round.request import Arrays, RoundRequest


class SiteJudge:
    """Asks all sites of a round to measure a model, and takes the median of their accuracies.

    So a site that lies, or a few, cannot move it far.

    sent: bytes of the models that were sent.
    failed: site -> why it did not measure, of the latest round.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed: dict[str, str] = {}
        self._exchange = Exchange()

    def __call__(self, grid: Grid, request: RoundRequest, arrays: Arrays) -> float | None:
        """Median accuracy; None when no site has measured."""
        requests = [
            (site, node, self._message(site, request, arrays)) for site, node in request.sites.items()
        ]
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
        shares = [sum(reply.correct) / sum(reply.total) for reply in replies.values() if sum(reply.total)]
        return median(shares) if shares else None

    def _message(self, site: str, request: RoundRequest, arrays: Arrays) -> EvaluateRequest:
        return EvaluateRequest(
            **request.stamp.stamp_fields,
            arrays=Tensors(arrays),
            **request.previous.fields_of(site),
        )
