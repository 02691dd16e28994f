"""Asks the sites, after a task's last round, for exemplars and class means, and then for counts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config import charges
from perennial.config.analytic import DEFAULT_SHRINKAGE
from perennial.config.evaluation import asks_for_tables, fits
from perennial.config.experiment import Experiment
from perennial.foundation.errors import DataError, ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES
from perennial.protocol.messages import EvaluateRequest, FinishTaskReply, FinishTaskRequest
from perennial.protocol.tensors import Tensors, content_sha256
from perennial.server.measures.calibration import chosen_temperature
from perennial.server.releases import Releases
from perennial.server.site_counts import Note, Requests, SiteCounts, ask_for_counts, model_asked_about
from perennial.strategies.round.exchange import Exchange, ask

if TYPE_CHECKING:
    from perennial.learning.analytic.statistics import Statistics
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

    def finish(self, sha256: str, width: int) -> tuple[list[str], Tensor | None]:
        """Tell the sites that the task is over, so that they choose exemplars and freeze its model.

        sha256: of that model. width: of its features.
        Returns (sites that now hold it, what classifies instead of the head: global class means (M, d), or
        the rows of a Gaussian head (M, d + 1), or None).
        """
        learner, privacy = self._experiment.learner, self._experiment.privacy
        if not self._experiment.needs_previous:
            return [], None
        if learner.means == "global" and privacy.enabled:
            # the class sums that the sites are about to be asked for are a release of their own
            charge = [charges.class_means(self._experiment, self._run).entry]
            same = "" if self._sums is not None else f"class_means {sha256}"
            self._releases.asked(self._round, self._sites, charge, same=same)
        requests = self._requests(FinishTaskRequest)
        if self._sums is not None and learner.means == "global":
            return opened_class_means(
                self._sums, self._grid, requests, sha256, width, self._deadline, self._note
            )

        def check(reply: FinishTaskReply) -> None:
            if learner.means == "global":
                check_class_sums(reply, reply.num_classes, width, privacy.enabled)
            if learner.classifier == "gaussian":
                check_sums(reply, width)
            if reply.model != sha256:
                raise ProtocolError(f"FinishTaskReply: model: found {reply.model:.12}, expected {sha256:.12}")

        replies = ask(
            self._grid, self._exchange, requests, FinishTaskReply, self._deadline, self._note, check
        )
        if learner.classifier != "gaussian":
            return list(replies), global_means(replies)
        try:
            return list(replies), gaussian_head(replies, width)
        except DataError as missing:
            self._note("classifier", f"the model answers with its own head: {missing}")
            return list(replies), None

    def counts(self, num_classes: int, means: Tensor | None) -> SiteCounts:
        """Ask for counts on the sites' held-out samples, if the experiment wants them.

        num_classes: M, of the tasks so far. means: as finish() gives them.
        """
        experiment = self._experiment
        if not experiment.evaluation.federated:
            return SiteCounts({})
        tables = asks_for_tables(experiment) and num_classes <= MOST_CLASSES
        fitted = self._asked(means, tables=True, validation=True) if tables and fits(experiment) else None
        temperature = None
        if fitted is not None and fitted.tables.total is not None:
            temperature = chosen_temperature(fitted.tables.total)
        found = self._asked(means, tables=tables, temperature=temperature)
        if fitted is not None and fitted.tables.total is not None and found.tables.total is not None:
            samples = fitted.tables.total.validation
            found.tables.total = replace(found.tables.total, validation=samples)
        return replace(found, temperature=temperature)

    def _asked(self, means: Tensor | None, **more: Any) -> SiteCounts:
        """The sites' answers to one request. more: its fields."""
        experiment = self._experiment
        requests = self._requests(
            EvaluateRequest,
            class_means=None if means is None else Tensors({experiment.learner.rows_name: means}),
            **more,
        )
        if experiment.evaluation.noise_multiplier is not None and requests:
            same = "" if self._sums is not None else _question(requests[0][2])
            charge = [charges.evaluation(experiment, self._run).entry]
            self._releases.asked(self._round, self._sites, charge, same=same)
        return ask_for_counts(experiment, self._grid, self._exchange, requests, self._sums, self._note)

    def _requests(self, kind: type[Request], **more: Any) -> list[tuple[str, int, Request]]:
        return [(site, node, kind(**self._fields(site), **more)) for site, node in self._sites.items()]


def _question(request: EvaluateRequest) -> str:
    """What sites are asked to count, by its content."""
    means = {} if request.class_means is None else request.class_means
    how = request.validation, request.tables, request.temperature
    return f"evaluation {how} {content_sha256(request.arrays)} {content_sha256(means)}"


def check_sums(reply: FinishTaskReply, width: int) -> None:
    """Raise ProtocolError if no samples can have the sums of a reply. width: of the features."""
    from perennial.strategies.analytic.checks import check_exact

    check_exact(_sums(reply, width))


def gaussian_head(
    replies: Mapping[str, FinishTaskReply],
    width: int,
    shrinkage: float = float(DEFAULT_SHRINKAGE["gaussian"]),
) -> Tensor:
    """(M, d + 1) float32: weights and bias of each class; one without samples is never predicted.

    Raises DataError when the samples of all sites do not determine it.
    """
    from perennial.learning.analytic.solve import Sums, gaussian

    if not replies:
        raise DataError("no site sent sums")
    total = reduce(add, (_sums(reply, width) for reply in replies.values()))
    tensors = gaussian(Sums.of(total), shrinkage).tensors()
    return torch.cat([tensors["head.weight"], tensors["head.bias"][:, None]], dim=1)


def _sums(reply: FinishTaskReply, width: int) -> "Statistics":
    from perennial.learning.analytic.statistics import SumsForm
    from perennial.strategies.analytic.checks import read_statistics

    if reply.statistics is None:
        raise ProtocolError("FinishTaskReply: statistics: found nothing, expected sums of features")
    return read_statistics(reply.statistics, SumsForm(width + 1), range(reply.num_classes))


def check_class_sums(reply: FinishTaskReply, num_classes: int, width: int, private: bool) -> None:
    """Raise ProtocolError naming the field if a site's sums cannot be sums of so many unit features.

    private: noise hides how long the sums are, so only shapes are checked.
    """
    found = reply.class_sums or {}
    shapes = {"sums": (num_classes, width), "counts": (num_classes,)}
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape or not found[name].is_floating_point():
            what = tuple(found[name].shape) if name in found else "nothing"
            raise ProtocolError(f"FinishTaskReply: class_sums.{name}: found {what}, expected floats {shape}")
    if len(found) != len(shapes):
        raise ProtocolError(f"FinishTaskReply: class_sums: found {sorted(found)}, allowed sums, counts")
    counts = found["counts"]
    if bool((counts < 0).any()) or bool((counts != counts.round()).any()):
        raise ProtocolError("FinishTaskReply: class_sums.counts: allowed whole numbers from 0")
    if not private and bool((found["sums"].norm(dim=1) > counts * (1 + 1e-4)).any()):
        raise ProtocolError("FinishTaskReply: class_sums.sums: longer than so many unit features can be")


def global_means(replies: Mapping[str, FinishTaskReply]) -> Tensor | None:
    """(M, d) class means of unit length, a row of zeros if no site has exemplars; None without replies."""
    parts: list[Tensors] = [sums for _, reply in sorted(replies.items()) if (sums := reply.class_sums)]
    if not parts:
        return None
    sums = torch.stack([part["sums"].double() for part in parts]).sum(dim=0)
    counts = torch.stack([part["counts"] for part in parts]).sum(dim=0)
    return unit_means(sums, counts)


def unit_means(sums: Tensor, counts: Tensor) -> Tensor:
    """(M, d) means of unit length, float32; a class without samples has a row of zeros.

    sums: (M, d), of features.
    counts: (M,), of samples.
    """
    return F.normalize(sums.masked_fill(counts[:, None] == 0, 0.0), dim=1).float()


def opened_class_means(
    sums: "MaskedSums",
    grid: Grid,
    requests: Requests[FinishTaskRequest],
    sha256: str,
    width: int,
    deadline: float,
    note: Note,
) -> tuple[list[str], Tensor | None]:
    """Open the sums of class features: (sites that keep the model of this hash, (M, d) global class means).

    Returns ([], None), with a note, when no sum was opened. width: d.
    """
    from perennial.config.secure_words import class_sums_of
    from perennial.privacy.secure.server_session import NotEnough

    try:
        opened = sums.collect(grid, "class_sums", model_asked_about(requests), requests, deadline, note)
        sums_and_counts = class_sums_of(opened.words, requests[0][2].num_classes, width)
    except (NotEnough, ValueError) as missing:
        note("class sums", str(missing))
        return [], None
    holders = list(opened.survivors) if opened.models in ((sha256,), ()) else []
    return holders, unit_means(*sums_and_counts)
