"""Whole runs in which two sites answer one round late, on a simulated clock."""

from typing import Any

from benchmarks.late_sites import COMMON, SITES, run
from benchmarks.table import Row

SMALL = (
    *COMMON,
    "data.samples_limit=240",
    "tasks={count: 2, rounds: 3}",
    "model={name: dual_backbone, backbone: mlp, hidden: [16]}",
)


def small(*changes: str) -> dict[str, Any]:
    return run(Row("small", "pp_fcil_digits", (*SMALL, *changes)), seed=1)


def counted(summary: dict[str, Any], key: str) -> list[int]:
    return [summary["sites"][f"site-{index}"][key] for index in range(SITES)]


def test_a_late_reply_counts_in_the_round_in_which_it_comes_and_not_in_the_next_task() -> None:
    summary = small()
    # asked in rounds 1, 3 and 5; what was asked in round 3, the last of its task, comes too late
    assert summary["late"] == 4
    assert counted(summary, "rounds") == [2, 2, 6, 6, 6]
    assert small()["model_sha256"] == summary["model_sha256"]


def test_recency_and_staleness_change_the_model() -> None:
    equal, recent, strict = (
        small(change) for change in ("strategy.kappa=0", "strategy.kappa=5", "strategy.staleness=0")
    )
    assert len({summary["model_sha256"] for summary in (equal, recent, strict)}) == 3
    assert strict["late"] == 0
    assert counted(strict, "rejected") == [3, 3, 0, 0, 0]
