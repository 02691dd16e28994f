"""The committed figures: all there, within their bounds, and the page says what the file says."""

import hashlib
from pathlib import Path
from statistics import median

import pytest

from benchmarks import bench
from benchmarks.bench import FIGURES, PAGE, RESULTS, Figure, Measured, read, with_table

MISSED = {
    "client_protection_overhead": "a turn of W1 is ten small steps; noise and ledger cost two more",
    "client_protection_overhead_long": "the ledger waits for the disk, and steps are fast here",
}
"""Figures that are known to miss their bound, and why; one that keeps it again must leave this list."""


def test_every_figure_is_there_once() -> None:
    names = [entry["name"] for entry in read()]
    assert names == list(FIGURES)


@pytest.mark.parametrize("entry", read(), ids=lambda entry: entry["name"])
def test_a_figure_keeps_its_bound(entry: dict) -> None:
    figure = FIGURES[entry["name"]]
    assert (entry["bound"], entry["side"]) == (figure.bound, figure.side)
    assert entry["value"] == pytest.approx(median(entry["samples"]), abs=1e-4)
    kept = figure.holds(entry["value"])
    assert kept == (entry["name"] not in MISSED), f"{entry['value']}, {figure.side} {figure.bound}"


def test_memory_of_an_aggregation_does_not_grow_with_the_number_of_updates() -> None:
    (facts,) = [entry["facts"] for entry in read() if entry["name"] == "aggregation_vs_flower"]
    assert facts["peak_kib_100_updates"] - facts["peak_kib_10_updates"] < facts["update_kib"] / 2


@pytest.mark.parametrize("entry", read(), ids=lambda entry: entry["name"])
def test_a_figure_says_where_it_was_measured(entry: dict) -> None:
    assert {"flwr", "torch"} <= entry["versions"].keys()
    assert "cores" in entry["machine"] and "GiB" in entry["machine"]


def test_the_page_shows_the_file() -> None:
    page = PAGE.read_text()
    assert page == with_table(page, read())


def test_what_a_user_measures_leaves_the_committed_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents() -> list[str]:
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in (RESULTS, PAGE)]

    before = contents()
    slow = Figure("seconds of `perennial --help`", "at most", 0.3, lambda folder: Measured([0.9, 1.1, 1.0]))
    monkeypatch.setitem(FIGURES, "help_seconds", slow)
    monkeypatch.setattr(bench, "OWN", tmp_path / "bench" / "bench.jsonl")
    (entry,) = bench.bench(["help_seconds"])
    assert entry["value"] == 1.0
    assert contents() == before
    (committed,) = [old["value"] for old in read() if old["name"] == "help_seconds"]
    row = (tmp_path / "bench" / "bench.md").read_text().splitlines()[2]
    assert row.endswith(f"| 1.00 | at most 0.3 | no | {committed:.2f} |")
