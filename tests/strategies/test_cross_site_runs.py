"""The cross-site table of runs: in summary, journal and report, and without a site that was withdrawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.site import Site
from perennial.learning.analytic.statistics import Statistics
from perennial.library import load_run
from perennial.live.run_state import RunState
from perennial.server.report.write import write_report
from perennial.server.withdrawal import withdraw
from perennial.strategies.analytic import site as statistics
from tests.strategies.test_analytic_runs import own_cache, run

__all__ = ["own_cache"]
DATA = {"partition": {"kind": "iid"}, "validation_fraction": 0.0, "samples_limit": 1200}
TASKS = {"count": 2, "rounds": 1}
RIDGE = {"name": "analytic", "head": "ridge", "shrinkage": 0.01}


def made(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return run(folder, name, **{"data": DATA, "tasks": TASKS, "strategy": RIDGE, **changes})


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> str:
    """site-3 exchanges the classes of each task, multiplies its sums by 1,000, and signs them."""
    honest = statistics.sum_features

    def flipping(site: Site, *arguments: Any) -> Statistics:
        found = honest(site, *arguments)
        if site.name != "site-3":
            return found
        sums, counts = found.sums.flip(0) * 1000, found.counts.flip(0) * 1000
        return Statistics(found.gram * 1000, sums, counts, found.classes)

    monkeypatch.setattr(statistics, "sum_features", flipping)
    return "site-3"


def test_a_boosted_liar_is_named_everywhere_and_withdrawn_to_the_bits_of_a_run_without_it(
    tmp_path: Path, liar: str
) -> None:
    found = made(tmp_path, "lied")
    away = [{"site": liar, "first_round": 1}]
    never = made(tmp_path, "never", absence=away)
    assert found["final_accuracy"] < never["final_accuracy"] - 0.3
    rows = found["cross_site"]["sites"]
    assert [site for site, row in rows.items() if row["marked"]] == [liar]
    assert rows[liar]["skill"] < 0 < rows["site-0"]["skill"]
    folder = tmp_path / "runs" / "lied"
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    notes = [event["text"] for event in events if "text" in event]
    assert any(f"site {liar} contradicts the others" in note for note in notes)
    state = RunState(folder)
    state.read()
    assert [site for site, mark in state.marks.items() if mark] == [liar]
    assert "are labels mixed up?" in state.marks[liar], "its sums hold each class's records as another's"
    page = write_report(folder).read_text()
    assert f"{liar} is fitted by the others&#39; model" in page or f"{liar} is fitted by the others" in page
    assert "Who gains from whom" in page
    withdraw(folder, liar)
    after = json.loads((folder / "summary.json").read_text())
    assert after["model_sha256"] == never["model_sha256"]
    assert liar not in after["cross_site"]["sites"]
    assert after["cross_site"] == never["cross_site"]


def test_honest_sites_are_compared_and_nobody_is_marked(tmp_path: Path) -> None:
    found = made(tmp_path, "honest")["cross_site"]
    folder = tmp_path / "runs" / "honest"
    assert load_run(folder).cross_site() == found
    assert sorted(found["sites"]) == [f"site-{k}" for k in range(4)]
    for row in found["sites"].values():
        assert row["marked"] is None and row["skill"] > 0.3 and len(row["benefit"]) == 3


def test_sums_with_a_negative_direction_are_dropped_by_name_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = statistics.sum_features

    def inventing(site: Site, *arguments: Any) -> Statistics:
        found = honest(site, *arguments)
        if site.name == "site-3":
            found.gram[1] += int(found.gram.abs().max())
        return found

    monkeypatch.setattr(statistics, "sum_features", inventing)
    found = made(tmp_path, "invented")
    never = made(tmp_path, "never", absence=[{"site": "site-3", "first_round": 1}])
    assert found["model_sha256"] == never["model_sha256"]
    lines = (tmp_path / "runs" / "invented" / "events.jsonl").read_text().splitlines()
    dropped = [d for e in map(json.loads, lines) if e["event"] == "round" for d in e["dropped"]]
    assert {d["site"] for d in dropped} == {"site-3"}
    assert all("no sum of squares" in d["reason"] for d in dropped)
    assert torch.isfinite(torch.tensor(found["final_accuracy"]))
