"""Class-balanced sums where a site tells counts and fails: its counts go with it, and no class is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perennial.client.site import Site
from perennial.models.saved import load_saved
from perennial.protocol.messages import StatisticsRequest
from perennial.strategies.analytic.site import SumsSite
from tests.strategies.test_analytic_runs import own_cache, run, sums_of

__all__ = ["own_cache"]
BALANCED = {"name": "analytic", "head": "balanced_ridge", "shrinkage": 0.1}
TASKS = {"count": 2, "rounds": 1}
FAILS = "site-1"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes FAILS crash at each request for sums up to a round."""
    honest = SumsSite.answers[StatisticsRequest]

    def until(last: int) -> None:
        def crashing(site: Site, request: StatisticsRequest) -> Any:
            if site.name == FAILS and request.round <= last:
                raise RuntimeError("the site's process died")
            return honest(site, request)

        answers = {**SumsSite.answers, StatisticsRequest: crashing}
        monkeypatch.setattr(SumsSite, "answers", answers)

    return until


def test_a_crash_between_counts_and_sums_costs_nothing(
    tmp_path: Path, failing: Callable[[int], None]
) -> None:
    away = [{"site": FAILS, "first_round": 1}]
    never = run(tmp_path, "never", strategy=BALANCED, tasks=TASKS, absence=away)
    failing(99)
    crashed = run(tmp_path, "crashed", strategy=BALANCED, tasks=TASKS)
    assert sums_of(crashed) == sums_of(never)
    assert crashed["model_sha256"] == never["model_sha256"]
    head = load_saved(tmp_path / "runs" / "crashed" / "model.safetensors").model.state_dict()["head.bias"]
    assert head.min() > -1e8, "every class is there"


def test_a_site_that_comes_back_counts_as_if_it_had_never_failed(
    tmp_path: Path, failing: Callable[[int], None]
) -> None:
    whole = run(tmp_path, "whole", strategy=BALANCED, tasks=TASKS)
    failing(1)
    returned = run(tmp_path, "returned", strategy=BALANCED, tasks=TASKS)
    assert sums_of(returned) == sums_of(whole)
    assert returned["model_sha256"] == whole["model_sha256"]


def test_who_comes_while_another_is_away_for_good_still_counts(tmp_path: Path) -> None:
    """site-0 sends sums and never answers again; site-1 comes after it."""
    away = [
        {"site": "site-0", "first_round": 2},
        *({"site": f"site-{k}", "first_round": 1, "last_round": 1} for k in (1, 2, 3)),
    ]
    found = run(
        tmp_path, "apart", strategy=BALANCED, tasks=TASKS, absence=away, data={"validation_fraction": 0.0}
    )
    whole = run(tmp_path, "whole", strategy=BALANCED, tasks=TASKS, data={"validation_fraction": 0.0})
    assert found["analytic"]["samples"] == whole["analytic"]["samples"] - _second_task_of(tmp_path, "site-0")
    assert found["final_accuracy"] > whole["final_accuracy"] - 0.1


def _second_task_of(tmp_path: Path, site: str) -> int:
    """Samples that the site would have given for the second task."""
    only = [{"site": f"site-{k}", "first_round": 1} for k in range(4) if f"site-{k}" != site]
    after = [*only, {"site": site, "first_round": 2}]
    data = {"validation_fraction": 0.0}
    both = run(tmp_path, "both", strategy=BALANCED, tasks=TASKS, absence=only, data=data)
    first = run(
        tmp_path, "first", strategy=BALANCED, tasks={"count": 2, "rounds": 1}, absence=after, data=data
    )
    return both["analytic"]["samples"] - first["analytic"]["samples"]
