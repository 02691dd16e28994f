"""A hospital's page, which listens on its own machine alone: what needs it, has left, and is approved."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.config.approval import Approval, read_approved_experiment
from perennial.deploy.application import read_offer
from perennial.deploy.review import describe_asked, offer_in_words
from perennial.foundation.errors import PerennialError
from perennial.live.diagnosis import of_site
from perennial.live.metrics import answer, make_metric, write_metrics
from perennial.live.site_state import HospitalState, describe_left
from perennial.live.tail import clean_value
from perennial.live.web import make_app, render
from perennial.server.report.markup import MISSING, format_count

SHOWN, DAY = 50, 86_400.0


class HospitalPages:
    """The page of one site.yaml."""

    def __init__(self, path: Path) -> None:
        self.state = HospitalState(path)
        self._asks: dict[tuple[object, ...], str] = {}
        self._turn = threading.Lock()

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        return make_app([Route("/", self._answer), Route("/metrics", self._answer_metrics)], hosts)

    def _answer(self, request: Request) -> Response:
        return HTMLResponse(self.draw())

    def _answer_metrics(self, request: Request) -> Response:
        with self._turn:
            self.state.read()
            return answer(format_site_metrics(self.state))

    def draw(self) -> str:
        """The site's page."""
        with self._turn:
            state = self.state
            state.read()
            status, words = _describe_status(state)
            left, share = describe_left(state.epsilon, state.limit)
            kinds = Counter(release.kind for release in state.releases).most_common()
            return render(
                "site.html",
                of_site(state),
                state=state,
                status=status,
                words=words,
                figures=_list_figures(state),
                left=left,
                share=share,
                offers=[{"name": offer.name, "asks": self._describe_offer(offer)} for offer in state.offered],
                approved=[
                    {
                        "name": str(one.settings.get("name", "unnamed")),
                        "time": one.time[:16].replace("T", " "),
                        "experiment": one.experiment[:16],
                        "bundle": one.bundle[:16],
                        "asks": self._describe_approval(one),
                    }
                    for one in state.approvals
                ],
                kinds=", ".join(format_count(count, kind) for kind, count in kinds),
                older=len(state.releases) - SHOWN,
                releases=[
                    (
                        release.time.replace("T", " ").replace("+00:00", ""),
                        state.name_of(release),
                        *(release.kind, release.words, release.unit),
                    )
                    for release in reversed(state.releases[-SHOWN:])
                ],
            )

    def _describe_offer(self, path: Path) -> str:
        """What an offered app asks, as `perennial site review` says it."""
        config = self.state.config
        earlier = next((found for found in reversed(self.state.approvals) if found.experiment), None)
        try:
            key = path, path.stat().st_mtime, str(config)
        except OSError as error:  # it has gone since it was listed, or is a link that leads nowhere
            return clean_value(f"{path}: cannot be read: {error.strerror}")
        return self._remember(key, lambda: offer_in_words(read_offer(path, config), config, earlier))

    def _describe_approval(self, approval: Approval) -> str:
        config = self.state.config

        def describe() -> Iterable[str]:
            experiment = read_approved_experiment(approval, config.approvals, config.plugins)
            return describe_asked(experiment, config.policy, approval)

        return self._remember((approval.name, str(config.policy)), describe)

    def _remember(self, key: tuple[object, ...], say: Callable[[], Iterable[str]]) -> str:
        """Words that take a while to find; those of a file that cannot be read say why."""
        if key not in self._asks:
            try:
                lines = [clean_value(line, 2000) for line in say()]
            except (PerennialError, ValueError, OSError) as error:
                lines = [clean_value(str(error))]
            if len(self._asks) > SHOWN:
                self._asks.clear()
            self._asks[key] = "\n".join(lines)
        return self._asks[key]


def _describe_status(state: HospitalState) -> tuple[str, str]:
    if state.consent.paused:
        return "paused", "paused"
    if not state.alive:
        return "silent", "SuperNode does not run"
    return ("running", "connected") if state.connected else ("waiting", "the SuperLink does not answer")


def _list_figures(state: HospitalState) -> list[tuple[str, str, str]]:
    """The most important numbers: epsilon spent and left, requests of a day."""
    unit = state.config.policy.unit or "the largest unit that every release hides"
    answered = sum(one.ended == "answered" and time.time() - one.began < DAY for one in state.asked)
    left = None if state.limit is None or state.epsilon is None else max(0.0, state.limit - state.epsilon)
    return [
        ("epsilon spent", _number(state.epsilon), f"in this site's life, for one {unit}"),
        ("left", _number(left), MISSING if state.limit is None else f"of {state.limit:g}"),
        ("releases", f"{len(state.releases):,}", "lines of the ledger"),
        ("answered", f"{answered:,}", "requests in a day"),
        ("waiting", f"{len(state.offered):,}", "offers to decide on"),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return "∞" if math.isinf(value) else f"{value:.3g}"


def format_site_metrics(state: HospitalState) -> bytes:
    """One site's metrics in Prometheus's text format."""
    site = state.config.site
    ends = Counter(one.ended for one in state.asked)
    figures: dict[str, tuple[str, float | None]] = {
        "site_supernode_up": ("1 while the SuperNode gives signs of life.", state.alive),
        "site_superlink_reachable": ("1 while it answers this site's SuperNode.", state.connected),
        "site_paused": ("1 while the hospital pauses.", bool(state.consent.paused)),
        "site_releases": ("Lines of the ledger.", len(state.releases)),
        "site_offers": ("Apps that wait for a decision.", len(state.offered)),
        "site_ledger_epsilon": ("Epsilon spent over this site's life.", state.epsilon),
        "site_ledger_epsilon_limit": ("Its lifetime budget.", state.limit),
    }
    found: list[Metric] = [
        make_metric(name, words, ("site",), [((site,), value)]) for name, (words, value) in figures.items()
    ]
    ended: Any = [((site, end), ends[end]) for end in ("answered", "refused", "failed")]
    words = "The newest requests by how they ended."
    return write_metrics(
        of_site(state), [*found, make_metric("site_requests", words, ("site", "ended"), ended)]
    )
