"""/metrics, for Prometheus: what alert rules need to know of runs and of a site."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perennial.deploy.superlink_status import SuperLinkStatus
from perennial.live.run_state import SITE_ORDER, RunState, Status
from perennial.live.runs import WatchedRun
from perennial.server.faults import Fault

CONTENT_TYPE = CONTENT_TYPE_LATEST
Values = Iterable[tuple[Sequence[str], float]]
"""(labels, value) of each sample of a metric."""


class _Families(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def exposition(found: Iterable[Metric]) -> bytes:
    """Write metrics in Prometheus's text format."""
    return generate_latest(_Families(found))


def gauge(
    name: str,
    words: str,
    labels: Sequence[str],
    values: Values,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A gauge or counter named perennial_NAME. words: its help text. values: (labels' values, value) each."""
    family = kind(f"perennial_{name}", words, labels=labels)
    for found, value in values:
        family.add_metric(list(found), value)
    return family


def fault_metric(faults: Iterable[Fault]) -> Metric:
    """A gauge that is 1 for each present fault, with the fault's words and whose turn it is as labels."""
    labels = tuple(Fault("superlink").facts())
    return gauge(
        "fault", "1 for a fault that stands.", labels, [(list(f.facts().values()), 1.0) for f in faults]
    )


def run_metrics(
    runs: Sequence[WatchedRun], faults: Iterable[Fault] = (), superlink: SuperLinkStatus | None = None
) -> bytes:
    """Metrics of runs, faults and the SuperLink, if there is one, in Prometheus's text format."""
    of_superlink = [] if superlink is None else _of_superlink(superlink)
    return exposition([fault_metric(faults), *of_superlink, *_of_runs(runs)])


def _of_superlink(superlink: SuperLinkStatus) -> Iterable[Metric]:
    yield gauge("superlink_up", "1 while the SuperLink serves.", (), [((), float(superlink.alive))])
    words = "When the certificate that the SuperLink serves with expires."
    ends = [((), superlink.certificate_ends)]
    yield gauge("superlink_certificate_ends_timestamp_seconds", words, (), ends)
    connected = [((name,), float(since is None)) for name, since in superlink.sites.items()]
    yield gauge("site_connected", "1 for a registered site that is connected.", ("site",), connected)


def _of_runs(runs: Sequence[WatchedRun]) -> Iterable[Metric]:
    states = [(watched.state.name, watched.state) for watched in runs]

    def one(
        name: str,
        words: str,
        value: Callable[[RunState], float | None],
        kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        """A metric with one value for each run that has it."""
        values = [((run,), found) for run, state in states if (found := value(state)) is not None]
        return gauge(name, words, ("run",), values, kind)

    by_status = [
        ((run, word), float(state.status == word)) for run, state in states for word in get_args(Status)
    ]
    yield gauge("run_status", "1 for the status that the run has.", ("run", "status"), by_status)
    yield one("run_round", "The round that goes on.", lambda state: state.round)
    yield one("run_rounds_planned", "Rounds of the whole run.", lambda state: state.rounds_planned)
    words = "Rounds without enough valid answers."
    yield one("run_rounds_skipped", words, lambda state: state.skipped, CounterMetricFamily)
    words = "Accuracy on all classes seen so far, as a share."
    yield one("run_accuracy_ratio", words, lambda state: state.accuracy)
    words = "How long the newest finished round took."
    yield one(
        "run_last_round_seconds", words, lambda state: state.rounds[-1].seconds if state.rounds else None
    )
    yield one("run_round_age_seconds", "Since when the round goes on.", _age_of_round)
    by_state = [
        ((run, word), float(sum(site.status == word for site in sites)))
        for run, state in states
        for sites in [state.sites()]
        for word in SITE_ORDER
    ]
    yield gauge("run_sites", "Sites by state.", ("run", "state"), by_state)
    # from 0 on, so that the first refusal is an increase
    refused = [((n, site), state.refused[site]) for n, state in states for site in sorted(state.site_names())]
    words, of_site = "Rounds that a site has refused.", ("run", "site")
    yield gauge("site_refusals", words, of_site, refused, CounterMetricFamily)
    spent = [((run.state.name, site), value) for run in runs for site, value in run.spending.by_site.items()]
    yield gauge("site_epsilon", "At most this much epsilon spent by a site in this run.", of_site, spent)


def _age_of_round(state: RunState) -> float | None:
    if state.round_began is None or state.status != "running":
        return None
    return max(0.0, time.time() - state.round_began)
