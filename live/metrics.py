"""/metrics, for Prometheus: what alert rules need to know of runs and of a site."""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perennial.deploy.superlink_status import SuperLinkStatus
from perennial.live.run_state import SITE_ORDER
from perennial.live.runs import WatchedRun
from perennial.server.faults import Fault

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATUSES = ("running", "paused", "waiting", "finished", "stopped", "silent", "ended")


class _Families(Collector):
    """Metrics that are computed anew for every request."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def exposition(make: Callable[[], Iterable[Metric]]) -> bytes:
    """Metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(make))
    return generate_latest(registry)


def gauge(
    name: str, words: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """One gauge with its values by label."""
    family = GaugeMetricFamily(f"perennial_{name}", words, labels=labels)
    for found, value in values:
        family.add_metric(list(found), value)
    return family


def counter(
    name: str, words: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """One counter with its values by label."""
    family = CounterMetricFamily(f"perennial_{name}", words, labels=labels)
    for found, value in values:
        family.add_metric(list(found), value)
    return family


def fault_metric(faults: Iterable[Fault]) -> Metric:
    """1 for every fault that stands, with its words and whose turn it is."""
    labels = tuple(Fault("superlink").facts())
    return gauge(
        "fault", "1 for a fault that stands.", labels, [(list(f.facts().values()), 1.0) for f in faults]
    )


def run_metrics(
    runs: Sequence[WatchedRun], faults: Iterable[Fault] = (), superlink: SuperLinkStatus | None = None
) -> bytes:
    """Of runs, of what is wrong, and of the SuperLink where there is one."""
    of_superlink = [] if superlink is None else list(_of_superlink(superlink))
    return exposition(lambda: [fault_metric(faults), *of_superlink, *_of_runs(runs)])


def _of_superlink(superlink: SuperLinkStatus) -> Iterable[Metric]:
    yield gauge("superlink_up", "1 while the SuperLink serves.", (), [((), float(superlink.alive))])
    yield gauge(
        "superlink_certificate_ends_timestamp_seconds",
        "When the certificate that the SuperLink serves with expires.",
        (),
        [((), superlink.certificate_ends)],
    )
    yield gauge(
        "site_connected",
        "1 for a registered site that is connected.",
        ("site",),
        [((name,), float(since is None)) for name, since in superlink.sites.items()],
    )


def _of_runs(runs: Sequence[WatchedRun]) -> Iterable[Metric]:
    run = ("run",)
    states = [(watched.state.name, watched.state) for watched in runs]
    yield gauge(
        "run_status",
        "1 for the status that the run has.",
        ("run", "status"),
        [((name, word), float(state.status == word)) for name, state in states for word in STATUSES],
    )
    yield gauge("run_round", "The round that goes on.", run, [((n,), state.round) for n, state in states])
    yield gauge(
        "run_rounds_planned",
        "Rounds of the whole run.",
        run,
        [((name,), state.rounds_planned) for name, state in states],
    )
    yield counter(
        "run_rounds_skipped",
        "Rounds without enough valid answers.",
        run,
        [((n,), s.skipped) for n, s in states],
    )
    yield gauge(
        "run_accuracy_ratio",
        "Accuracy on all classes seen so far, as a share.",
        run,
        [((name,), state.accuracy) for name, state in states if state.accuracy is not None],
    )
    yield gauge(
        "run_last_round_seconds",
        "How long the newest finished round took.",
        run,
        [((name,), state.rounds[-1].seconds) for name, state in states if state.rounds],
    )
    yield gauge(
        "run_round_age_seconds",
        "Since when the round goes on.",
        run,
        [
            ((name,), max(0.0, time.time() - state.round_began))
            for name, state in states
            if state.round_began is not None and state.status == "running"
        ],
    )
    yield gauge(
        "run_sites",
        "Sites by state.",
        ("run", "state"),
        [
            ((name, word), float(sum(site.status == word for site in sites)))
            for name, state in states
            for sites in [state.sites()]
            for word in SITE_ORDER
        ],
    )
    yield counter(
        "site_refusals",
        "Rounds that a site has refused.",
        ("run", "site"),
        # from 0 on, so that the first refusal is an increase
        [
            ((name, site), state.refused[site])
            for name, state in states
            for site in sorted(state.site_names())
        ],
    )
    yield gauge(
        "site_epsilon",
        "At most this much epsilon spent by a site in this run.",
        ("run", "site"),
        [
            ((watched.state.name, site), value)
            for watched in runs
            for site, value in watched.spending.by_site.items()
        ],
    )
