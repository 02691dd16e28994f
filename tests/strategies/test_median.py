"""The median of updates: the hand case, any order of arrival, pieces of any size, as a base of wrappers."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.strategies.krum import Median
from perennial.strategies.round.gate import Admitted
from perennial.strategies.sums import update_file
from tests.rounds import begun

HAND = [(1.0, 2.0), (1.2, 1.8), (0.8, 2.2), (1.1, 2.1), (10.0, -10.0)]


def aggregate(updates: Sequence[Tensor], order: Sequence[int] = ()) -> Tensor:
    """One round; tensors of two shapes hold the values of an update."""
    half = len(updates[0]) // 2
    reference = {"a": torch.zeros(half), "b": torch.zeros(len(updates[0]) - half, 1)}
    round_ = begun(Median(), reference)
    for index in order or range(len(updates)):
        update = {"a": updates[index][:half], "b": updates[index][half:, None]}
        round_.add(Admitted(f"site-{index}", update, float(updates[index].norm()), 10**index))
    assert round_.complete() == len(updates)
    after = round_.result()
    return torch.cat([after["a"], after["b"].flatten()])


@pytest.mark.parametrize(("sites", "expected"), [(5, (1.1, 2.0)), (4, (1.05, 2.05))])
def test_the_hand_case(sites: int, expected: tuple[float, float]) -> None:
    found = aggregate([torch.tensor(update) for update in HAND[:sites]])
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sites", [5, 6])
def test_any_order_of_arrival_and_any_size_of_piece_give_the_same_bits(
    sites: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(sites)
    updates = [torch.randn(41, generator=generator) * 10 ** (index - 2) for index in range(sites)]
    found = aggregate(updates)
    for order in itertools.islice(itertools.permutations(range(sites)), 5, 120, 23):
        assert torch.equal(aggregate(updates, order), found)
    monkeypatch.setattr(update_file, "PIECE_BYTES", 8 * sites * 7)
    assert torch.equal(aggregate(updates), found)
    # what does not fit in memory waits in a file
    for kept in (0, 2):
        monkeypatch.setattr(update_file, "KEPT_BYTES", kept * 4 * 41)
        assert torch.equal(aggregate(updates), found)


def test_one_site_however_far_away_and_however_many_samples_it_claims_does_not_carry_the_others_along() -> (
    None
):
    honest = [torch.tensor(update) for update in HAND[:4]]
    found = aggregate([*honest, torch.tensor([1e30, -1e30])])
    assert float((found - torch.tensor([1.0, 2.0])).norm()) < 0.3


def short_run(tmp_path: Path, name: str, strategy: Any) -> dict[str, Any]:
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / "rivals_digits.yaml"),
        overrides=json.dumps([f"strategy={json.dumps(strategy)}", "tasks.rounds=1", "tasks.count=2"]),
        runs=str(tmp_path),
        name=name,
        device="cpu",
    )
    return run_in_process(settings)


@pytest.mark.parametrize(
    "strategy",
    [
        {
            "name": "clustered_personalisation",
            "global_rounds": 0,
            "clusters": 1,
            "channels": 8,
            "base": "median",
        },
    ],
    ids=lambda strategy: strategy["name"],
)
def test_a_run_around_the_median_is_repeated_to_the_bit(tmp_path: Path, strategy: dict[str, Any]) -> None:
    found = [short_run(tmp_path, f"run-{index}", strategy) for index in range(2)]
    assert found[0]["model_sha256"] == found[1]["model_sha256"]
