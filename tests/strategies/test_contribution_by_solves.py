"""What sites contribute to a closed form: every coalition's model in one solve, and nobody is asked."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.site import Site
from perennial.foundation.errors import ConfigError
from perennial.learning.analytic.solve import Sums, ridge
from perennial.learning.analytic.statistics import Collector, Statistics
from perennial.models.feature_maps.ball import on_grid
from perennial.server.verification import verify
from perennial.server.withdrawal import withdraw
from perennial.strategies.analytic import site as statistics
from perennial.strategies.analytic.kept import KeptSums
from perennial.strategies.valuation.shapley import exact
from perennial.strategies.valuation.solved import JudgedBySites, Solved, leave_one_out
from tests.strategies.test_analytic_runs import run

DATA = {"partition": {"kind": "class_subset", "classes_per_site": 4}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}
BASE = {"name": "analytic", "head": "ridge", "shrinkage": 0.01}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def valued(folder: Path, name: str, base: dict[str, Any] = BASE, **settings: Any) -> dict[str, Any]:
    return run(
        folder,
        name,
        data=DATA,
        tasks=TASKS,
        strategy={"name": "contribution", "estimator": "solve", "base": base, **settings},
    )


def kept(folder: Path) -> tuple[KeptSums, torch.Tensor, torch.Tensor]:
    """Three sites of one class each, and samples to measure on."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 6, generator=generator)
    y = torch.arange(90) % 3
    x[torch.arange(90), y] += 3.0
    features = on_grid(x)
    sums = KeptSums(folder)
    for k, site in enumerate(("a", "b", "c")):
        collector = Collector(6, range(3))
        rows = (y == k) & (torch.arange(90) < 60)
        collector.add(features[rows], y[rows])
        sums.add(1, [site], collector.finish())
    return sums, features[60:], y[60:]


def test_shapley_values_and_leave_one_out_are_those_of_models_solved_from_scratch(tmp_path: Path) -> None:
    sums, features, labels = kept(tmp_path)
    game = Solved(sums, 3, lambda total: ridge(total, 0.1))

    def utility(head: dict[str, torch.Tensor]) -> float:
        scores = features @ head["head.weight"].T + head["head.bias"]
        return float((scores.argmax(dim=1) == labels).float().mean())

    def direct(members: frozenset[int]) -> float:
        if not members:
            return 0.0
        total = sums.kept(1, "abc"[min(members)])
        for member in sorted(members)[1:]:
            total = total + sums.kept(1, "abc"[member])
        return utility(ridge(Sums.of(total), 0.1).tensors())

    value = game.value(utility)
    everybody = frozenset(range(3))
    assert value(everybody) == direct(everybody) > 0.9
    phi = exact(3, value)
    orders = list(permutations(range(3)))
    by_hand = [0.0] * 3
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            by_hand[player] += (direct(before | {player}) - direct(before)) / len(orders)
    assert phi.tolist() == pytest.approx(by_hand)
    assert sum(phi) == pytest.approx(value(everybody))
    expected = [value(everybody) - direct(everybody - {player}) for player in range(3)]
    assert leave_one_out(3, value) == pytest.approx(expected)


def test_a_run_says_what_each_site_contributed_and_trains_nobody_again(tmp_path: Path) -> None:
    found = valued(tmp_path, "valued")
    plain = run(tmp_path, "plain", data=DATA, tasks=TASKS, strategy=BASE)
    assert found["model_sha256"] == plain["model_sha256"]
    assert (found["bytes_up"], found["bytes_down"]) == (plain["bytes_up"], plain["bytes_down"])
    values = {site: entry["value"] for site, entry in found["contribution"].items()}
    assert set(values) == {f"site-{k}" for k in range(4)}
    # on the samples that the judge draws, all values together are what the model is worth
    assert sum(values.values()) == pytest.approx(found["valuation"]["gain"])
    assert found["valuation"]["gain"] == pytest.approx(found["balanced_accuracy"][-1], abs=0.1)
    assert set(found["valuation"]["leave_one_out"]) == set(values)
    assert all(entry["flag"] is None for entry in found["contribution"].values())


def test_sums_judge_each_other_out_of_sample(tmp_path: Path) -> None:
    """Three sites of all classes, the third of which calls every class the next one."""
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(180) % 3
    x = torch.randn(180, 6, generator=generator)
    x[torch.arange(180), y] += 3.0
    features, sums = on_grid(x), KeptSums(tmp_path)
    for k, site in enumerate(("a", "b", "liar")):
        collector, rows = Collector(6, range(3)), slice(60 * k, 60 * k + 60)
        collector.add(features[rows], (y[rows] + 1) % 3 if site == "liar" else y[rows])
        sums.add(1, [site], collector.finish())
    game = JudgedBySites(sums, 3)
    of_a, _, of_liar = game.values()
    assert of_a(frozenset()) == of_a(frozenset({0})) == 0.0, "its own sums do not count"
    # by hand: the head of b alone, and its squared error on a's records
    head = ridge(Sums.of(sums.kept(1, "b")), game._shrinkage)
    scores = features[:60].double() @ head.weight.T + head.bias
    truth = torch.nn.functional.one_hot(y[:60], 3).double()
    error = float((scores - truth).square().sum()) / 60
    assert of_a(frozenset({0, 1})) == pytest.approx(1 - error, abs=1e-9)
    row_of_a = exact(3, of_a).tolist()
    assert row_of_a[0] == 0 and row_of_a[1] > 0.2 and row_of_a[2] < 0
    assert exact(3, of_liar)[0] < 0


def test_a_server_without_samples_values_sites_by_each_others_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = statistics.summed

    def flipping(site: Site, *arguments: Any) -> Statistics:
        found = honest(site, *arguments)
        if site.name != "site-3":
            return found
        return Statistics(found.gram, found.sums.flip(0), found.counts.flip(0), found.classes)

    monkeypatch.setattr(statistics, "summed", flipping)
    even = {"partition": {"kind": "iid"}, "validation_fraction": 0.0, "sites": 4}
    found = run(
        tmp_path,
        "valued",
        data=even,
        tasks=TASKS,
        evaluation={"central": False},
        strategy={"name": "contribution", "estimator": "solve", "base": BASE},
    )
    assert found["valuation"]["held_out"] == "sites" and found["valuation"]["utility"] == "squared error"
    liar = found["contribution"].pop("site-3")
    assert liar["value"] < 0 and "labels mixed up" in liar["flag"] and len(liar["costs"]) == 3
    for entry in found["contribution"].values():
        assert entry["flag"] is None and entry["costs"] == ["site-3"]
        assert entry["value"] > 0 and entry["value_low"] < entry["value"] < entry["value_high"]
    assert "contribution" in (tmp_path / "runs" / "valued" / "report.html").read_text()


def test_a_valued_run_can_still_be_withdrawn_from(tmp_path: Path) -> None:
    valued(tmp_path, "valued")
    statements = withdraw(tmp_path / "runs" / "valued", "site-2")
    assert statements is not None
    verify(statements)
    away = [{"site": "site-2", "first_round": 1}]
    never = run(tmp_path, "never", data=DATA, tasks=TASKS, strategy=BASE, absence=away)
    found = json.loads((tmp_path / "runs" / "valued" / "summary.json").read_text())
    assert found["analytic"]["sums_sha256"] == never["analytic"]["sums_sha256"]
    assert found["model_sha256"] == never["model_sha256"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "online"}, "'solve' goes with analytic"),
        ({"utility": "probability"}, "no probabilities"),
        ({"base": {**BASE, "keep_sites": False}}, "needs each site's own sums"),
        ({"base": {**BASE, "head": "balanced_ridge"}}, "needs each site's own sums"),
    ],
)
def test_what_cannot_be_solved_for_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        valued(tmp_path, "refused", **changes)
