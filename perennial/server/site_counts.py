"""The sites' own counts of right answers: asked for at the end of a task, and added up with their noise."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from flwr.serverapp import Grid

from perennial.config.evaluation import count_noise, count_subgroups
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES, EvaluationTables
from perennial.privacy.noise import Noise
from perennial.privacy.noised_counts import STEPS, CountNoise, join_cells, round_to_samples
from perennial.protocol.messages import EvaluateReply, EvaluateRequest, FinishTaskRequest
from perennial.protocol.stamp import Maskable
from perennial.protocol.tensors import hash_tensors
from perennial.server.evaluation import ReportedCounts, pool_counts, withhold_counts
from perennial.server.measures.record import compute_wilson_interval
from perennial.strategies.round.exchange import Exchange, check_counts, yield_answers

if TYPE_CHECKING:
    from perennial.strategies.secure.masked_sums import MaskedSums
    from perennial.strategies.secure.store import Opened

LARGEST = 2**62


@dataclass
class SiteTables:
    """Tables of sites, added up. total: over the `reported` sites that sent tables; None without any.

    by_site: (M, 3) samples, right answers and predictions, of each site that sent tables in the clear.
    suppressed: number of sites that withhold some counts.
    """

    total: EvaluationTables | None = None
    by_site: dict[str, np.ndarray] = field(default_factory=dict)
    reported: int = 0
    suppressed: int = 0

    def add(self, site: str, reply: EvaluateReply, subgroups: int) -> None:
        """Add one reply's tables, so that memory does not grow with the number of sites."""
        self.suppressed += bool(reply.withheld or reply.uncalibrated)
        if reply.tables is None:
            return
        tables = read_tables(reply, subgroups)
        self.total = tables if self.total is None else self.total + tables
        self.by_site[site] = tables.by_class()
        self.reported += 1

    @classmethod
    def of_a_sum(cls, beside: list[int], classes: int, subgroups: int) -> "SiteTables":
        """Read tables from the further counts of a masked sum. Raises ValueError if their number is wrong."""
        if not beside:
            return cls()
        *counts, reported, suppressed = beside
        tables = EvaluationTables.from_vector(np.array(counts, dtype=np.int64), classes, subgroups)
        return cls(tables if reported else None, {}, reported, suppressed)


def count_beside(classes: int, subgroups: int) -> int:
    """Number of further counts, beside right answers and samples, in a masked sum with tables."""
    return len(EvaluationTables.empty(classes, subgroups).vector()) + 2


def read_tables(reply: EvaluateReply, subgroups: int) -> EvaluationTables:
    """Read the tables in a reply. Raises ProtocolError if they have another form or size."""
    assert reply.tables is not None
    counts = reply.tables.get("counts")
    if set(reply.tables) != {"counts"} or counts is None or counts.ndim != 1 or counts.is_floating_point():
        raise ProtocolError("EvaluateReply: tables: allowed `counts`, one list of whole numbers")
    try:
        return EvaluationTables.from_vector(counts.cpu().numpy(), reply.num_classes, subgroups)
    except ValueError as error:
        raise ProtocolError(f"EvaluateReply: {error}") from error


def check_tables(reply: EvaluateReply, subgroups: int, *, asked: bool, validation: bool = False) -> None:
    """Raise ProtocolError if a site's tables cannot be true, do not fit its counts, or were not asked for.

    validation: whether they must hold likelihoods alone, from which the temperature is chosen.
    """
    if reply.tables is None:
        return
    if not asked or reply.num_classes > MOST_CLASSES:
        raise ProtocolError(f"EvaluateReply: tables: not asked for; allowed up to {MOST_CLASSES} classes")
    tables = read_tables(reply, subgroups)
    counts = tables.vector()
    if counts.min(initial=0) < 0 or counts.max(initial=0) > LARGEST:
        raise ProtocolError("EvaluateReply: tables: a count is below 0 or beyond what can be")
    fitted = {"likelihood", "validation"}
    if validation:
        others = [f.name for f in fields(tables) if f.name not in fitted and getattr(tables, f.name).any()]
        if others:
            raise ProtocolError(f"EvaluateReply: tables: {others[0]}: not asked for with validation samples")
        return
    if tables.likelihood.any():
        raise ProtocolError("EvaluateReply: tables: likelihood: not asked for with test samples")
    total, samples = np.array(reply.total), sum(reply.total)
    fits = (
        np.array_equal(tables.confusion.sum(axis=1), total)
        and tables.correct == reply.correct
        and np.array_equal(tables.positive.sum(axis=1), total)
        and np.array_equal(tables.negative.sum(axis=1), samples - total)
        and (tables.confidence[:, 0].sum(axis=1) == samples).all()
        and (tables.confidence[:, 1] <= tables.confidence[:, 0]).all()
    )
    if not fits:
        raise ProtocolError("EvaluateReply: tables: they do not add up to the counts beside them")


Asked = TypeVar("Asked", bound=Maskable)
Requests = Sequence[tuple[str, int, Asked]]
Note = Callable[[str, str], None]
ALL_SITES = ""
"""In place of a site's name: counts of all sites together, of which no site's part is known."""
_Z = 1.96
"""Standard deviations on either side of a 95 % interval."""


@dataclass(frozen=True)
class SiteCounts:
    """Sites' counts of right answers. A cell is the right or the wrong answers of one class.

    by_site: what each site reported, or all together as ALL_SITES.
    std: of the noise on a reported cell; 0: none. tables: the tables that they reported beside it.
    temperature: at which tables count probabilities, chosen by validation samples; None: 1.
    """

    by_site: Mapping[str, ReportedCounts]
    std: float = 0.0
    tables: SiteTables = field(default_factory=SiteTables)
    temperature: float | None = None

    @property
    def held_out(self) -> int:
        """Number of samples that the sites counted."""
        return sum(samples or 0 for _, total in self.by_site.values() for samples in total)

    def sum_counts(self, num_classes: int) -> ReportedCounts:
        """The sum of all sites' counts; noised ones are moved into what is possible."""
        correct, total = pool_counts(self.by_site.values(), num_classes)
        return clamp_counts(correct, total) if self.std else (correct, total)

    def interval(self, num_classes: int) -> tuple[float, float] | None:
        """95 % interval of the accuracy over all classes, for the sampling of patients and for the noise.

        Without noise Wilson's; with it a normal one, whose variance is that of both. None if nothing was
        reported, or all of it may be noise.
        """
        correct, total = self.sum_counts(num_classes)
        samples = sum(reported or 0 for reported in total)
        cells = sum(reported is not None for _, of_site in self.by_site.values() for reported in of_site)
        drowned = _Z * self.std * math.sqrt(2 * cells)
        if samples <= drowned or None in total:
            return None
        share = sum(correct) / samples
        if not self.std:
            ends = compute_wilson_interval(sum(correct), samples)
            return None if ends.low is None or ends.high is None else (ends.low, ends.high)
        noise = cells * self.std**2 * ((1 - share) ** 2 + share**2) / samples**2
        half = _Z * math.sqrt(max(share * (1 - share), 0.0) / samples + noise)
        return max(0.0, share - half), min(1.0, share + half)


def clamp_counts(correct: Sequence[int], total: Sequence[int | None]) -> ReportedCounts:
    """Move noised counts to the nearest possible ones: none below 0, right answers at most the samples."""
    samples = [None if reported is None else max(0, reported) for reported in total]
    return [
        min(max(0, right), reported or 0) for right, reported in zip(correct, samples, strict=True)
    ], samples


def open_counts(
    sums: "MaskedSums",
    grid: Grid,
    requests: Requests[EvaluateRequest],
    deadline: float,
    note: Note,
    *,
    noised: bool,
    beside: int = 0,
) -> tuple[list[int], list[int], list[int]] | None:
    """Open the sums of all sites' counts: (right answers, samples of each class, other counts).

    Returns None, with a note, when no sum was opened. noised: whether sites add noise, so that any count can
    be negative. beside: how many other counts there are.
    """
    from perennial.config.secure_words import decode_counts
    from perennial.privacy.secure.server_session import NotEnough

    classes, statistic = requests[0][2].num_classes, requests[0][2].statistic
    about, length = hash_asked_model(requests), 2 * classes + beside

    def read(opened: "Opened") -> tuple[list[int], list[int], list[int]]:
        return decode_counts(opened.words, classes, noised=noised, beside=beside)

    try:
        return sums.collect(grid, statistic, about, requests, deadline, note, length, read)[1]
    except (NotEnough, ValueError) as missing:
        note("evaluation", str(missing))
        return None


def hash_asked_model(requests: Sequence[tuple[str, int, EvaluateRequest | FinishTaskRequest]]) -> str:
    """The model that the sites are asked about."""
    return hash_tensors(requests[0][2].arrays) if requests else ""


def ask_for_counts(
    experiment: Experiment,
    grid: Grid,
    exchange: Exchange,
    requests: Sequence[tuple[str, int, EvaluateRequest]],
    sums: "MaskedSums | None",
    note: Note,
) -> SiteCounts:
    """Ask the sites for counts on a model, noised as the experiment says; the caller records the release.

    sums: opens masked sums; None: each site's reply is read. note: called with (site, reason) for faults.
    """
    if not requests:
        return SiteCounts({})
    deadline, noise = experiment.rounds.deadline, count_noise(experiment)
    of_server = experiment.privacy.mode == "client_central"
    tables, subgroups, first = SiteTables(), count_subgroups(experiment), requests[0][2]
    if sums is not None:
        beside = count_beside(first.num_classes, subgroups) if first.tables else 0
        noised = noise is not None
        opened = open_counts(sums, grid, requests, deadline, note, noised=noised, beside=beside)
        if opened is None:
            return SiteCounts({})
        correct, total, others = opened
        reported = {ALL_SITES: withhold_counts(correct, total, None)}
        tables = SiteTables.of_a_sum(others, first.num_classes, subgroups)
    else:

        def check(reply: EvaluateReply) -> None:
            check_counts(reply, None if of_server else noise)
            check_tables(reply, subgroups, asked=first.tables, validation=first.validation)
            if of_server and noise is not None and not noise.within(reply.correct, reply.total):
                raise ProtocolError("EvaluateReply: counts of a larger norm than evaluation.clip_counts")

        found: dict[str, ReportedCounts] = {}
        for site, reply in yield_answers(grid, exchange, requests, EvaluateReply, deadline, note, check):
            if reply.withheld:
                note(site, f"withholds the counts of {len(reply.withheld)} classes (its floor)")
            found[site] = withhold_counts(reply.correct, reply.total, reply.withheld)
            tables.add(site, reply, subgroups)
        # in the order of the requests, whatever order the replies came in
        reported = {site: found[site] for site, _, _ in requests if site in found}
        tables.by_site = {site: tables.by_site[site] for site in reported if site in tables.by_site}
    if noise is None or not reported:
        return SiteCounts(reported, tables=tables)
    classes = requests[0][2].num_classes
    if of_server:
        return SiteCounts({ALL_SITES: _add_noise(reported, classes, noise)}, noise.std)
    if ALL_SITES not in reported:
        return SiteCounts(reported, noise.std)
    # every site added a part of the noise where it is shared, and the whole of it in the other modes
    honest = experiment.secure.honest if experiment.secure is not None else 0
    shared = experiment.privacy.shared and honest
    return SiteCounts(reported, noise.std * math.sqrt(len(requests) / (honest if shared else 1)))


def _add_noise(
    reported: Mapping[str, ReportedCounts],
    classes: int,
    noise: CountNoise,
) -> ReportedCounts:
    """The sum of shrunk counts with the server's noise; what no site reported stays unknown."""
    correct, total = pool_counts(reported.values(), classes)
    cells = join_cells(correct, [samples or 0 for samples in total]) * STEPS
    right, samples = round_to_samples(cells + noise.draw(len(cells), Noise()))
    return right, [None if known is None else n for known, n in zip(total, samples, strict=True)]
