"""The sites' own counts of right answers: asked for at the end of a task, and added up with their noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from perennial.config.evaluation import count_noise, subgroups_of
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError
from perennial.privacy.noise import Noise
from perennial.privacy.noised_counts import STEPS, CountNoise, cells_of, in_samples
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.server.evaluation import ReportedCounts, pooled, reported_counts
from perennial.server.masked_task_end import Note, opened_counts
from perennial.server.site_tables import SiteTables, check_tables, counts_beside
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import answers, check_counts
from perennial.strategies.secure.masked_sums import MaskedSums

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

    def together(self, num_classes: int) -> ReportedCounts:
        """The sum of all sites' counts; noised ones are moved into what is possible."""
        correct, total = pooled(self.by_site.values(), num_classes)
        return possible(correct, total) if self.std else (correct, total)

    def interval(self, num_classes: int) -> tuple[float, float] | None:
        """95 % interval of the accuracy over all classes, for the sampling of patients and for the noise.

        Without noise Wilson's; with it a normal one, whose variance is that of both. None if nothing was
        reported, or all of it may be noise.
        """
        correct, total = self.together(num_classes)
        samples = sum(reported or 0 for reported in total)
        cells = sum(reported is not None for _, of_site in self.by_site.values() for reported in of_site)
        drowned = _Z * self.std * math.sqrt(2 * cells)
        if samples <= drowned or None in total:
            return None
        share = sum(correct) / samples
        if not self.std:
            return wilson(share, samples)
        noise = cells * self.std**2 * ((1 - share) ** 2 + share**2) / samples**2
        half = _Z * math.sqrt(max(share * (1 - share), 0.0) / samples + noise)
        return max(0.0, share - half), min(1.0, share + half)


def wilson(share: float, samples: int) -> tuple[float, float]:
    """95 % interval of a probability. Wilson 1927."""
    scale = 1 + _Z**2 / samples
    middle = share + _Z**2 / (2 * samples)
    half = _Z * math.sqrt(share * (1 - share) / samples + _Z**2 / (4 * samples**2))
    return (middle - half) / scale, (middle + half) / scale


def possible(correct: Sequence[int], total: Sequence[int | None]) -> ReportedCounts:
    """Move noised counts to the nearest possible ones: none below 0, right answers at most the samples."""
    samples = [None if reported is None else max(0, reported) for reported in total]
    return [
        min(max(0, right), reported or 0) for right, reported in zip(correct, samples, strict=True)
    ], samples


def ask_for_counts(
    experiment: Experiment,
    grid: Grid,
    exchange: Exchange,
    requests: Sequence[tuple[str, int, EvaluateRequest]],
    sums: MaskedSums | None,
    note: Note,
) -> SiteCounts:
    """Ask the sites for counts on a model, noised as the experiment says; the caller records the release.

    sums: opens masked sums; None: each site's reply is read. note: called with (site, reason) for faults.
    """
    if not requests:
        return SiteCounts({})
    deadline, noise = experiment.rounds.deadline, count_noise(experiment)
    of_server = experiment.privacy.mode == "client_central"
    tables, subgroups, first = SiteTables(), subgroups_of(experiment), requests[0][2]
    if sums is not None:
        beside = counts_beside(first.num_classes, subgroups) if first.tables else 0
        noised = noise is not None
        opened = opened_counts(sums, grid, requests, deadline, note, noised=noised, beside=beside)
        if opened is None:
            return SiteCounts({})
        correct, total, others = opened
        reported = {ALL_SITES: reported_counts(correct, total, None)}
        tables = SiteTables.of_a_sum(others, first.num_classes, subgroups)
    else:

        def check(reply: EvaluateReply) -> None:
            check_counts(reply, None if of_server else noise)
            check_tables(reply, subgroups, asked=first.tables, validation=first.validation)
            if of_server and noise is not None and not noise.within(reply.correct, reply.total):
                raise ProtocolError("EvaluateReply: counts of a larger norm than evaluation.clip_counts")

        found: dict[str, ReportedCounts] = {}
        for site, reply in answers(grid, exchange, requests, EvaluateReply, deadline, note, check):
            if reply.withheld:
                note(site, f"withholds the counts of {len(reply.withheld)} classes (its floor)")
            found[site] = reported_counts(reply.correct, reply.total, reply.withheld)
            tables.add(site, reply, subgroups)
        # in the order of the requests, whatever order the replies came in
        reported = {site: found[site] for site, _, _ in requests if site in found}
        tables.by_site = {site: tables.by_site[site] for site in reported if site in tables.by_site}
    if noise is None or not reported:
        return SiteCounts(reported, tables=tables)
    classes = requests[0][2].num_classes
    if of_server:
        return SiteCounts({ALL_SITES: _noised(reported, classes, noise)}, noise.std)
    if ALL_SITES not in reported:
        return SiteCounts(reported, noise.std)
    # every site added a part of the noise where it is shared, and the whole of it in the other modes
    honest = experiment.secure.honest if experiment.secure is not None else 0
    shared = experiment.privacy.shared and honest
    return SiteCounts(reported, noise.std * math.sqrt(len(requests) / (honest if shared else 1)))


def _noised(
    reported: Mapping[str, ReportedCounts],
    classes: int,
    noise: CountNoise,
) -> ReportedCounts:
    """The sum of shrunk counts with the server's noise; what no site reported stays unknown."""
    correct, total = pooled(reported.values(), classes)
    cells = cells_of(correct, [samples or 0 for samples in total]) * STEPS
    right, samples = in_samples(cells + noise.draw(len(cells), Noise()))
    return right, [None if known is None else n for known, n in zip(total, samples, strict=True)]
