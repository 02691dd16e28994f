"""`bounds` under closed form: they cut a site's influence, or they are refused; none is ignored."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perennial.config.experiment import Experiment
from perennial.config.rounds import BoundsConfig
from perennial.foundation.errors import ConfigError, StateError
from perennial.learning.analytic.statistics import Statistics
from perennial.server.verification import verify
from perennial.server.withdrawal import withdraw, withdraw_records
from perennial.strategies.analytic.kept import KeptSums, compute_parts
from tests.server.test_withdrawal import summary
from tests.server.test_withdrawn_records import group as write_group
from tests.server.test_withdrawn_records import simulated as open_simulated
from tests.strategies.test_analytic_runs import experiment, own_cache, run

__all__ = ["own_cache"]
UNEVEN = {"partition": {"kind": "dirichlet", "alpha": 0.1, "min_samples": 1}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}


@pytest.mark.parametrize(
    "bounds",
    [
        {"norm_multiple": 5.0},
    ],
)
def test_a_key_that_would_do_nothing_is_refused_by_name(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"bounds\.{next(iter(bounds))}: .*which does nothing"):
        Experiment.model_validate(experiment(bounds=bounds))


@pytest.mark.parametrize(
    "strategy", [{"name": "analytic", "keep_sites": False}, {"name": "analytic", "head": "balanced_ridge"}]
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, strategy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bounds\.share, bounds\.registered"):
        run(tmp_path, "refused", strategy=strategy, bounds={"share": 0.3}, tasks=TASKS)


def kept(counts: dict[str, int]) -> KeptSums:
    sums = KeptSums(total=Statistics.build_empty(3, range(2)))
    sums.contributions = {1: {site: {"sha256": "", "samples": n} for site, n in counts.items()}}
    return sums


def test_who_counts_for_how_much() -> None:
    four = {"a": 900, "b": 100, "c": 100, "d": 100}
    assert compute_parts(kept(four), BoundsConfig(share=1 / 3)) == {(1, "a"): 170}
    assert compute_parts(kept(four), BoundsConfig()) == {}
    assert compute_parts(kept(four), BoundsConfig(registered={"a": 225})) == {(1, "a"): 256}
    three = {site: four[site] for site in "abc"}
    assert compute_parts(kept(three), BoundsConfig(share=1 / 3)) == {}, "fewer than four sites"


def test_a_cut_changes_the_model_and_no_sum_and_can_be_withdrawn_from(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", data=UNEVEN, tasks=TASKS)
    cut = run(tmp_path, "cut", data=UNEVEN, tasks=TASKS, bounds={"share": 1 / 3})
    assert cut["analytic"]["sums_sha256"] == whole["analytic"]["sums_sha256"]
    assert cut["model_sha256"] != whole["model_sha256"]
    certificate = withdraw(tmp_path / "runs" / "cut", "site-1")
    away = [{"site": "site-1", "first_round": 1}]
    never = run(tmp_path, "never", data=UNEVEN, tasks=TASKS, bounds={"share": 1 / 3}, absence=away)

    found = json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())
    assert found["model_sha256"] == never["model_sha256"]
    assert certificate is not None and verify(certificate)


def test_records_taken_from_a_cut_run_leave_the_model_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command stopped before it wrote the site's files, and is given again."""
    for name in ("cut", "stopped"):
        run(tmp_path, name, data=UNEVEN, tasks=TASKS, bounds={"share": 1 / 3})
    # site-3 has most of task 2, and is cut there also without the records
    folder = tmp_path / "runs" / "cut"
    site = open_simulated(folder, "site-3")
    file = write_group(folder, site.data.x[site.data.train[::9]].numpy(), "some", "site-3")
    first = verify(withdraw_records(folder, "site-3", file))
    model = summary(folder)
    assert verify(withdraw_records(folder, "site-3", file)) == first
    assert summary(folder)["model_sha256"] == model["model_sha256"]
    assert summary(folder)["cross_site"] == model["cross_site"]

    stopped = tmp_path / "runs" / "stopped"
    file = write_group(stopped, site.data.x[site.data.train[::9]].numpy(), "some", "site-3")
    with monkeypatch.context() as patch:
        patch.setattr(KeptSums, "keep_again", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            withdraw_records(stopped, "site-3", file)
    with pytest.raises(StateError, match=r"site-3-task-0001\.safetensors: not the sums that site-3 gave"):
        withdraw(stopped, "site-3")
    verify(withdraw_records(stopped, "site-3", file))
    assert summary(stopped)["model_sha256"] == model["model_sha256"]
