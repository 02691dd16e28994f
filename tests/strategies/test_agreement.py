"""Who is left out of a round because its update points elsewhere than all the others."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.benchmarks.dishonest import attacked_run
from perennial.config.bounds import BoundsConfig
from perennial.config.run import APP_ROOT, RunSettings
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.agreement import compared, cosines
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.running_bounds import RunningBounds
from perennial.strategies.round.waiting import WaitingReplies
from perennial.strategies.sums.update_file import UpdateFile

SITES = [f"site-{number}" for number in range(6)]


def directions(strange: int, sites: int = 6, noise: float = 0.7, seed: int = 1) -> Tensor:
    """(sites, 400) a common direction with noise; the last `strange` ones are noise alone."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(400, generator=generator)
    rows = common + noise * torch.randn(sites, 400, generator=generator)
    if strange:
        rows[-strange:] = torch.randn(strange, 400, generator=generator)
    return rows


def filed(rows: Tensor) -> UpdateFile:
    file = UpdateFile({"weight": rows[0], "bn.running_var": torch.zeros(2)})
    for name, row in zip(SITES, rows, strict=False):
        # statistics are the same everywhere, and would hide any difference if they were compared
        file.add(name, {"weight": row, "bn.running_var": torch.full((2,), 1e6)})
    return file


def bounds(state: dict[str, Any] | None = None, **config: Any) -> RunningBounds:
    return RunningBounds(BoundsConfig(**config), {} if state is None else state)


def test_cosines_are_of_parameters_alone_and_of_no_length() -> None:
    rows = directions(1)
    rows[5] *= 1e4
    rows[4] = 0.0
    found = cosines(filed(rows).pieces(), 6)
    expected = torch.nn.functional.cosine_similarity(rows[None, :4].double(), rows[:4, None].double(), dim=2)
    assert torch.allclose(found[:4, :4], expected, atol=1e-9)
    assert found[4].abs().max() == 0.0
    assert abs(float(found[5, 0])) < 0.2


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("strange", [1, 2])
def test_sites_that_point_elsewhere_are_left_out_whatever_their_length(strange: int, length: float) -> None:
    rows = directions(strange)
    rows[-strange:] *= length
    assert bounds().left_out(filed(rows), quorum=1).keys() == set(SITES[-strange:])


def test_nobody_is_left_out_where_data_differ() -> None:
    assert bounds().left_out(filed(directions(0, noise=5.0)), 1) == {}
    similar = cosines(filed(directions(0)).pieces(), 6)
    assert compared(similar, SITES, (), 0.4).left_out == frozenset()


def test_a_site_in_between_means_that_data_differ() -> None:
    rows = directions(1)
    rows[4] = 0.7 * rows[0] + rows[1].roll(7)
    found = compared(cosines(filed(rows).pieces(), 6), SITES, (), 0.6)
    assert 0.35 < found.agreement[SITES[4]] < 0.6
    assert found.left_out == frozenset()


def test_half_of_the_sites_are_no_minority_and_four_are_too_few() -> None:
    assert bounds().left_out(filed(directions(3)), 1) == {}
    assert bounds().left_out(filed(directions(1, sites=4)), 1) == {}
    assert not bounds().compares(4) and bounds().compares(5) and not bounds().compares(65)


def test_no_round_loses_its_quorum_by_it() -> None:
    assert bounds().left_out(filed(directions(1)), quorum=6) == {}
    assert bounds().left_out(filed(directions(1)), quorum=5).keys() == {SITES[5]}
    assert bounds(least_agreement=None).left_out(filed(directions(1)), 1) == {}


def test_a_site_stays_out_until_it_agrees_again() -> None:
    running = bounds()
    assert running.left_out(filed(directions(1)), 1).keys() == {SITES[5]}
    # a later round in which nobody agrees much: the others are not judged anew, the suspected one is
    late = directions(1, noise=2.5, seed=4)
    assert running.left_out(filed(late), 1).keys() == {SITES[5]}
    resumed = bounds(json.loads(json.dumps(running.state)))
    assert resumed.left_out(filed(late), 1).keys() == {SITES[5]}
    # it agrees now, but the others hardly do
    assert resumed.left_out(filed(directions(0, noise=2.5, seed=4)), 1).keys() == {SITES[5]}
    assert resumed.left_out(filed(directions(0)), 1) == {}
    assert resumed.state["suspected"] == [] and resumed.met[SITES[5]]["left_out"] == 4
    # who is left out and does not answer is still suspected when it comes back
    assert running.left_out(filed(directions(0)[:5]), 1) == {}
    assert running.state["suspected"] == [SITES[5]]


def test_any_order_of_arrival_leaves_out_the_same_sites() -> None:
    rows = directions(1, sites=5)
    found = set()
    for order in itertools.permutations(range(5)):
        waiting = WaitingReplies.needed(bounds(), {"weight": rows[0]}, True, 5)
        assert waiting is not None
        for number in order:
            update = {"weight": rows[number]}
            waiting.add(Admitted(SITES[number], update, float(rows[number].norm()), 10))
        dropped: list[tuple[str, str]] = []
        kept = [reply.site for reply in waiting.counting(1, dropped)]
        found.add((*kept, *(site for site, _ in dropped)))
    assert found == {tuple(SITES[:5])}


@pytest.mark.parametrize("name", ["median", "krum", "geometric_median", "pfa"])
def test_methods_that_compare_updates_themselves_are_left_alone(name: str) -> None:
    options: dict[str, Any] = {"global_rounds": 1, "layer": 1} if name == "pfa" else {}
    strategy = build_strategy(name, options)
    assert not strategy.compares_sites
    assert build_strategy("fedavg", {}).compares_sites


def test_a_backdoor_is_left_out_and_named_where_data_are_alike(tmp_path: Path) -> None:
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / "robust_digits.yaml"),
        overrides=json.dumps(["tasks.rounds=2", "data.partition.alpha=100"]),
        runs=str(tmp_path),
        name="run",
        device="cpu",
    )
    summary = attacked_run(settings, "backdoor:boost=100,samples=1e8")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert summary["bounds"] == {"site-4": {"scaled": 0, "capped": 0, "left_out": 2}}
    reasons = {entry["site"]: entry["reason"] for event in rounds for entry in event["dropped"]}
    assert reasons.keys() == {"site-4"} and "bounds.least_agreement" in reasons["site-4"]
    assert summary["attack_success"] < 0.05
