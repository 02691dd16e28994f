"""What the operator's pages know of the SuperLink and of registered sites when no run goes."""

import json
import os
import time
from pathlib import Path

import pytest

from perennial.deploy.superlink import (
    STATUS,
    SuperLinkStatus,
    read_superlink_status,
)
from perennial.foundation.heartbeat import SILENT_AFTER
from perennial.live.diagnosis import of_run, of_superlink
from perennial.live.run_state import RunState
from tests.live_pages import ask, going_on, operator_pages, until

YEAR = 365 * 86_400.0


def said(
    runs: Path,
    sites: dict[str, float | None],
    ends: float | None = None,
    silence: float = 0.0,
    others: dict[str, str] | None = None,
    unknown: dict[str, str] | None = None,
    waits: bool = False,
) -> None:
    """The SuperLink has said this, so many seconds ago."""
    runs.mkdir(exist_ok=True)
    content = {"certificate_ends": time.time() + YEAR if ends is None else ends, "sites": sites}
    content |= {"others": others or {}, "unknown": unknown or {}, "certificate_waits": waits}
    (runs / STATUS).write_text(json.dumps(content))
    os.utime(runs / STATUS, (time.time() - silence, time.time() - silence))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"sites": {}}', '{"sites": 3, "certificate_ends": 1}', "{" * 9999, "[" * 9999]
)
def test_a_damaged_status_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS).write_text(content)
    assert read_superlink_status(tmp_path) is None


def test_the_overview_says_that_the_superlink_is_dead_and_who_is_silent(tmp_path: Path) -> None:
    said(tmp_path, {"graz": None, "<b>linz": time.time()})
    with operator_pages(tmp_path) as address:
        page = ask(address).body
        assert "The SuperLink serves; 1 of 2 registered sites connected." in page
        assert "No sign of life of the SuperNode of &lt;b&gt;linz." in page and "perennial site check" in page
        metrics = ask(f"{address}/metrics").body
        assert "perennial_superlink_up 1.0" in metrics
        assert 'perennial_site_connected{site="graz"} 1.0' in metrics
        said(tmp_path, {"graz": None}, silence=SILENT_AFTER + 1)
        until(lambda: "The SuperLink gives no sign of life" in ask(address).body)
        assert "(containers: docker compose up -d)" in ask(address).body
        assert "perennial_superlink_up 0.0" in ask(f"{address}/metrics").body


def test_a_simulation_has_no_superlink(tmp_path: Path) -> None:
    with going_on(tmp_path), operator_pages(tmp_path) as address:
        assert "SuperLink" not in ask(address).body and "superlink" not in ask(f"{address}/metrics").body


def test_a_running_run_names_a_site_that_fell_silent_and_a_dead_superlink(tmp_path: Path) -> None:
    with going_on(tmp_path) as run:
        run.begin_round(1, ["graz", "linz"])
        said(tmp_path, {"graz": None, "linz": time.time() - 25, "of another run": 1.0})
        state = RunState(run.folder)
        state.read()
        assert {site.name: site.status for site in state.sites()} == {"graz": "training", "linz": "silent"}
        assert [(fault.kind, fault.site) for fault in of_run(state)] == [("silent", "linz")]
        said(tmp_path, {"graz": None, "linz": 1.0}, silence=SILENT_AFTER + 1)
        state.read()
        assert state.superlink is not None
        (first,) = of_superlink(state.superlink)
        assert first.kind == "superlink" and first.grade == "critical"
        assert state.site("linz", False).status == "training", "what a dead SuperLink said last holds no more"


@pytest.mark.parametrize(
    ("days", "grade", "words"),
    [(-0.1, "critical", "has expired"), (1.5, "warning", "expires within 30 days."), (31.0, "", "")],
)
def test_the_end_of_the_certificate_is_told_in_time(days: float, grade: str, words: str) -> None:
    status = SuperLinkStatus(silent_for=0.0, certificate_ends=time.time() + days * 86_400)
    found = list(of_superlink(status))
    assert [fault.grade for fault in found] == [grade] * bool(grade)
    assert all(words in fault.said and "perennial deploy rotate" in fault.turn for fault in found)
