"""/metrics, for Prometheus: what alert rules need to know of runs and of a site."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from perennial.deploy.superlink import SuperLinkStatus
from perennial.live.run_state import SITE_ORDER, RunState, Status
from perennial.server.faults import Fault

Values = Iterable[tuple[Sequence[str], float | None]]
"""(labels, value) of each sample of a metric; None: there is none."""


class _Families(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def write_metrics(faults: Iterable[Fault], found: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus's text format; each present fault is 1, with its words and owner as labels."""
    labels = tuple(Fault("superlink").collect_facts())
    values = [([*fault.collect_facts().values()], 1.0) for fault in faults]
    return generate_latest(
        _Families([make_metric("fault", "1 for a fault that stands.", labels, values), *found])
    )


def answer(body: bytes) -> Response:
    """An answer to Prometheus."""
    return Response(body, media_type=CONTENT_TYPE_LATEST)


def make_metric(
    name: str,
    words: str,
    labels: Sequence[str],
    values: Values,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A gauge or counter named perennial_NAME. words: its help text."""
    family = kind(f"perennial_{name}", words, labels=labels)
    for found, value in values:
        if value is not None:
            family.add_metric(list(found), value)
    return family


def list_superlink_metrics(superlink: SuperLinkStatus) -> Iterable[Metric]:
    """Yield the metrics of the SuperLink and of the sites that it serves."""
    yield make_metric("superlink_up", "1 while the SuperLink serves.", (), [((), float(superlink.alive))])
    words = "When the certificate that the SuperLink serves with expires."
    ends = [((), superlink.certificate_ends)]
    yield make_metric("superlink_certificate_ends_timestamp_seconds", words, (), ends)
    connected = [((name,), float(since is None)) for name, since in superlink.sites.items()]
    yield make_metric("site_connected", "1 for a registered site that is connected.", ("site",), connected)


def list_run_metrics(
    states: Sequence[RunState], spent: Mapping[str, Mapping[str, float]]
) -> Iterable[Metric]:
    """Yield the metrics of runs. spent: run -> site -> epsilon."""
    of_run = {
        "run_round": ("The round that goes on.", lambda state: state.round),
        "run_rounds_planned": ("Rounds of the whole run.", lambda state: state.rounds_planned),
        "run_accuracy_ratio": ("Accuracy on all classes seen so far.", lambda state: state.accuracy),
        "run_last_round_seconds": (
            "How long the newest finished round took.",
            lambda state: state.rounds[-1].seconds if state.rounds else None,
        ),
        "run_round_age_seconds": ("Since when the round goes on.", _measure_round_age),
    }
    for name, (words, value) in of_run.items():
        yield make_metric(name, words, ("run",), [((state.name,), value(state)) for state in states])
    words, skipped = "Rounds without enough valid answers.", [((s.name,), s.skipped) for s in states]
    yield make_metric("run_rounds_skipped", words, ("run",), skipped, CounterMetricFamily)
    by_status = [((s.name, word), float(s.status == word)) for s in states for word in get_args(Status)]
    yield make_metric("run_status", "1 for the status that the run has.", ("run", "status"), by_status)
    by_state = [
        ((state.name, word), float(sum(site.status == word for site in sites)))
        for state in states
        for sites in [state.sites()]
        for word in SITE_ORDER
    ]
    yield make_metric("run_sites", "Sites by state.", ("run", "state"), by_state)
    # from 0 on, so that the first refusal is an increase
    refused = [((s.name, site), s.refused[site]) for s in states for site in sorted(s.site_names())]
    words, of_site = "Rounds that a site has refused.", ("run", "site")
    yield make_metric("site_refusals", words, of_site, refused, CounterMetricFamily)
    epsilon = [((run, site), value) for run, sites in spent.items() for site, value in sites.items()]
    yield make_metric(
        "site_epsilon", "At most this much epsilon spent by a site in this run.", of_site, epsilon
    )


def _measure_round_age(state: RunState) -> float | None:
    if state.round_began is None or state.status != "running":
        return None
    return max(0.0, time.time() - state.round_began)
