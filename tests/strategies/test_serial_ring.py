"""The ring hop by hop: order, hand-over, failures, frozen parts, bytes, and a stop between two hops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.config.rounds import BoundsConfig
from perennial.foundation.errors import ConfigError
from perennial.protocol.messages import TrainRequest
from perennial.strategies.round.gate import RunningBounds
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.serial_ring import hop_log as ring_log
from perennial.strategies.serial_ring.method import SerialRing, list_layers, perturb_layers
from tests.strategies.ring_grid import START, ScriptedGrid, adds, doubles_and_adds, refuses, request, services


def ring(folder: Path | None = None, **settings: Any) -> SerialRing:
    strategy = SerialRing(**({"segments": 1, "reshuffle": "never", "relabel": "none"} | settings))
    strategy.attach(services(folder))
    return strategy


def test_each_site_starts_from_where_the_one_before_it_left_off() -> None:
    grid = ScriptedGrid({"a": doubles_and_adds(1), "b": doubles_and_adds(10), "c": doubles_and_adds(100)})
    outcome = ring().train_round(grid, request(grid))
    assert outcome.arrays is not None
    # 2 -> 2*2+1 = 5 -> 2*5+10 = 20 -> 2*20+100 = 140
    assert outcome.arrays["head.weight"].tolist() == [[140]]
    assert grid.asked == ["a", "b", "c"]
    assert [float(seen.arrays["head.weight"]) for seen in grid.seen] == [2, 5, 20]


def test_with_segments_the_model_goes_round_once_for_each() -> None:
    grid = ScriptedGrid({"a": adds(1), "b": adds(10)})
    outcome = ring(segments=3).train_round(grid, request(grid))
    assert grid.asked == ["a", "b"] * 3
    assert outcome.participants["a"].num_examples == 30
    assert outcome.participants["a"].steps == 3
    assert outcome.arrays is not None
    assert float(outcome.arrays["head.weight"]) == 2 + 3 * 11


def bounded(grid: ScriptedGrid) -> RoundRequest:
    return replace(request(grid), running=RunningBounds(BoundsConfig(norm_multiple=3), {}))


@pytest.mark.parametrize("boosted", ["a", "b", "c", "d"])
def test_in_a_first_round_a_boosted_turn_is_bounded_by_the_others_or_the_ring_begins_anew(
    boosted: str,
) -> None:
    grid = ScriptedGrid({site: adds(1000.0 if site == boosted else 1.0) for site in "abcd"})
    outcome = ring().train_round(grid, bounded(grid))
    assert outcome.arrays is not None
    # nobody comes before a; its turn is known for what it is after c's
    anew = boosted == "a"
    assert [site for site, _ in outcome.dropped] == (["a", "b", "c"] if anew else [])
    assert float(outcome.arrays["head.weight"]) == pytest.approx(2 + (1 if anew else 3 + 3))
    if anew:
        assert "the ring began anew, because the update of a was above" in outcome.dropped[0][1]
    else:
        assert any(f"site {boosted}: update: norm" in text for text in outcome.warnings)
        assert outcome.participants[boosted].scaled


def sends_nan(request: TrainRequest) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, torch.nan) for name, t in request.arrays.items()}


@pytest.mark.parametrize(
    ("fault", "kind"), [(refuses, "refused"), (lambda _: None, "absent"), (sends_nan, "dropped")]
)
def test_a_ring_with_a_failing_site_is_the_ring_without_it(fault: Any, kind: str) -> None:
    with_fault = ScriptedGrid({"a": doubles_and_adds(1), "b": fault, "c": doubles_and_adds(5)})
    without = ScriptedGrid({"a": doubles_and_adds(1), "c": doubles_and_adds(5)})
    outcome = ring().train_round(with_fault, request(with_fault))
    expected = ring().train_round(without, request(without)).arrays
    assert outcome.arrays is not None and expected is not None
    assert all(torch.equal(outcome.arrays[name], expected[name]) for name in START)
    assert sorted(outcome.participants) == ["a", "c"]
    found = {kind: [site for site, _ in getattr(outcome, kind)] for kind in ("refused", "dropped")}
    assert (found | {"absent": outcome.absent})[kind] == ["b"]


def test_when_all_fail_there_is_no_new_model() -> None:
    grid = ScriptedGrid({"a": refuses, "b": refuses})
    outcome = ring().train_round(grid, request(grid))
    assert outcome.skipped
    assert [site for site, _ in outcome.refused] == ["a", "b"]


class Stopped(BaseException):
    """The server is killed."""


def test_a_stopped_server_goes_on_at_the_next_hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_log, "SAVE_EVERY", 0.0)
    answers = {"a": doubles_and_adds(1), "b": doubles_and_adds(10), "c": doubles_and_adds(100)}
    settings = {"segments": 2, "reshuffle": "sweep", "init_noise_std": 0.1}
    whole = ScriptedGrid(answers)
    expected = ring(tmp_path / "whole", **settings).train_round(whole, request(whole))

    def stop(_: TrainRequest) -> None:
        raise Stopped

    for hops in range(6):
        folder = tmp_path / f"stopped-{hops}"
        first = ScriptedGrid(answers)
        first.answers[whole.asked[hops]] = stop if hops < 3 else stop_second(answers[whole.asked[hops]], stop)
        with pytest.raises(Stopped):
            ring(folder, **settings).train_round(first, request(first))
        second = ScriptedGrid(answers)
        outcome = ring(folder, **settings).train_round(second, request(second))
        assert second.asked == whole.asked[hops:]
        assert outcome.arrays is not None and expected.arrays is not None
        assert all(torch.equal(outcome.arrays[name], expected.arrays[name]) for name in START)
        assert outcome.details == expected.details
        assert outcome.bytes_up == expected.bytes_up


def stop_second(answer: Any, stop: Any) -> Any:
    """A site that answers once and is asked again when the server is killed."""
    asked: list[TrainRequest] = []

    def once(request: TrainRequest) -> Any:
        asked.append(request)
        return answer(request) if len(asked) == 1 else stop(request)

    return once


def test_initial_noise_changes_the_drawn_layers_only() -> None:
    arrays = {f"layer{k}.{part}": torch.zeros(3) for k in range(6) for part in ("weight", "bias")}
    assert list_layers(arrays) == tuple(f"layer{k}" for k in range(6))
    noisy = perturb_layers(arrays, 0.1, seed=1)
    changed = {name.split(".")[0] for name in arrays if not torch.equal(noisy[name], arrays[name])}
    assert len(changed) == 3
    assert all(noisy[f"{layer}.{part}"].all() for layer in changed for part in ("weight", "bias"))


def test_uncounted_releases_are_refused() -> None:
    private = {
        "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "evaluation": {"federated": False},
    }
    with pytest.raises(ConfigError, match="segments: found 4 with privacy"):
        SerialRing().attach(services(**private))
