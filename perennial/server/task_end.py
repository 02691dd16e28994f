"""Asks the sites, after a task's last round, for exemplars, and then for counts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.serverapp import Grid

from perennial.config import charges
from perennial.config.evaluation import asks_for_tables, fits
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES
from perennial.protocol.messages import EvaluateRequest, FinishTaskReply, FinishTaskRequest
from perennial.protocol.tensors import content_sha256
from perennial.server.measures.calibration import chosen_temperature
from perennial.server.releases import Releases
from perennial.server.site_counts import SiteCounts, ask_for_counts
from perennial.strategies.round.exchange import Exchange, ask

if TYPE_CHECKING:
    from perennial.strategies.secure.masked_sums import MaskedSums

Request = TypeVar("Request", FinishTaskRequest, EvaluateRequest)


class TaskEnd:
    """The exchanges at the end of each task of a run.

    sums: the masked sums, or None if the server sees each site's reply.
    note: called with (site, reason) for every site whose reply is missing, refused or not valid.
    """

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        releases: Releases,
        sums: "MaskedSums | None",
        note: Callable[[str, str], None],
    ) -> None:
        self._grid, self._experiment, self._releases = grid, experiment, releases
        self._sums, self._note = sums, note
        self._deadline = experiment.rounds.deadline
        self._exchange = Exchange()
        if sums is not None:
            sums.exchange = self._exchange

    def begin(
        self, run: str, number: int, sites: Mapping[str, int], fields: Callable[[str], dict[str, Any]]
    ) -> None:
        """Begin the exchanges of a task that is over.

        number: of its last round. sites: name -> node id of those to ask.
        fields: returns the fields that all requests to a site share.
        """
        self._run, self._round, self._sites, self._fields = run, number, sites, fields
        self._exchange.bytes_up = self._exchange.bytes_down = 0

    @property
    def bytes(self) -> tuple[int, int]:
        """(up, down) bytes of tensors since begin()."""
        return self._exchange.bytes_up, self._exchange.bytes_down

    def finish(self, sha256: str) -> list[str]:
        """Tell the sites that the task is over, so that they choose exemplars and freeze its model.

        sha256: of that model. Returns the sites that now hold it.
        """
        if not self._experiment.needs_previous:
            return []

        def check(reply: FinishTaskReply) -> None:
            if reply.model != sha256:
                raise ProtocolError(f"FinishTaskReply: model: found {reply.model:.12}, expected {sha256:.12}")

        requests = self._requests(FinishTaskRequest)
        return list(
            ask(self._grid, self._exchange, requests, FinishTaskReply, self._deadline, self._note, check)
        )

    def counts(self, num_classes: int) -> SiteCounts:
        """Ask for counts on the sites' held-out samples, if the experiment wants them.

        num_classes: M, of the tasks so far.
        """
        experiment = self._experiment
        if not experiment.evaluation.federated:
            return SiteCounts({})
        tables = asks_for_tables(experiment) and num_classes <= MOST_CLASSES
        fitted = self._asked(tables=True, validation=True) if tables and fits(experiment) else None
        temperature = None
        if fitted is not None and fitted.tables.total is not None:
            temperature = chosen_temperature(fitted.tables.total)
        found = self._asked(tables=tables, temperature=temperature)
        if fitted is not None and fitted.tables.total is not None and found.tables.total is not None:
            samples = fitted.tables.total.validation
            found.tables.total = replace(found.tables.total, validation=samples)
        return replace(found, temperature=temperature)

    def _asked(self, **more: Any) -> SiteCounts:
        """The sites' answers to one request. more: its fields."""
        experiment = self._experiment
        requests = self._requests(EvaluateRequest, **more)
        if experiment.evaluation.noise_multiplier is not None and requests:
            same = "" if self._sums is not None else _question(requests[0][2])
            charge = [charges.evaluation(experiment, self._run).entry]
            self._releases.asked(self._round, self._sites, charge, same=same)
        return ask_for_counts(experiment, self._grid, self._exchange, requests, self._sums, self._note)

    def _requests(self, kind: type[Request], **more: Any) -> list[tuple[str, int, Request]]:
        return [(site, node, kind(**self._fields(site), **more)) for site, node in self._sites.items()]


def _question(request: EvaluateRequest) -> str:
    """What sites are asked to count, by its content."""
    how = request.validation, request.tables, request.temperature
    return f"evaluation {how} {content_sha256(request.arrays)}"
