"""Optimisers at the server, Krum and the trimmed mean: hand cases, state that grows, orders of arrival."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from perennial.config.experiment import load_experiment
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.grid import InProcessGrid
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.krum import Krum, MultiKrum, TrimmedMean
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays
from perennial.strategies.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tests.rounds import begun
from tests.server.test_durability import Stop, stop_at, write

OPTIMISERS = (FedAvgM, FedAdam, FedYogi, FedAdagrad)
POINTS = [(1.0, 2.0), (1.2, 1.8), (0.8, 2.2), (1.1, 2.1), (10.0, -10.0)]


def play(
    strategy: IncrementalStrategy, reference: Arrays, rows: list[Tensor], samples: list[int] | None = None
) -> Arrays:
    """One round of which these updates come."""
    round_ = begun(strategy, reference)
    for number, row in enumerate(rows):
        count = 1 if samples is None else samples[number]
        round_.add(Admitted(f"site-{number}", {"w": row}, float(row.norm()), count))
    round_.complete()
    return round_.result()


def test_momentum_by_hand_after_the_mean_by_samples() -> None:
    method, model = FedAvgM(server_lr=0.5, momentum=0.9), {"w": torch.zeros(1)}
    model = play(method, model, [torch.tensor([1.0]), torch.tensor([4.0])], [2, 1])
    assert float(model["w"]) == pytest.approx(0.5 * 2.0)
    model = play(method, model, [torch.tensor([1.0])])
    assert float(model["w"]) == pytest.approx(1.0 + 0.5 * (0.9 * 2.0 + 1.0))


@pytest.mark.parametrize(
    ("kind", "scale"),
    [(FedAdam, 0.99 * 0.01 + 0.01 * 4), (FedYogi, 0.01 + 0.01 * 4), (FedAdagrad, 0.01 + 4)],
)
def test_the_published_steps_by_hand(kind: Any, scale: float) -> None:
    model = play(kind(tau=0.1), {"w": torch.zeros(1)}, [torch.tensor([2.0])])
    first = 2.0 if kind is FedAdagrad else 0.1 * 2.0
    assert float(model["w"]) == pytest.approx(0.1 * first / (scale**0.5 + 0.1))


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_moments_grow_with_the_head_and_come_back_from_a_checkpoint(kind: Any) -> None:
    first = kind()
    play(first, {"w": torch.zeros(2)}, [torch.tensor([1.0, -1.0])])
    again = kind()
    again.load_state_dict(first.state_dict())
    grown, update = {"w": torch.zeros(3)}, [torch.tensor([0.5, 0.5, 0.5])]
    found = [play(method, grown, update)["w"] for method in (first, again, kind())]
    assert torch.equal(found[0], found[1])
    assert found[0][2] == found[2][2], "an entry of a new class begins as all entries began"


@pytest.mark.parametrize("make", [*OPTIMISERS, Krum, MultiKrum, TrimmedMean])
def test_no_order_of_arrival_changes_a_bit(make: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(7, generator=generator) * 10 ** (k - 2) for k in range(5)]

    def aggregate(order: tuple[int, ...]) -> Tensor:
        round_ = begun(make(), {"w": torch.zeros(7)})
        for k in order:
            round_.add(Admitted(f"site-{k}", {"w": rows[k]}, float(rows[k].norm()), k + 1))
        round_.complete()
        return round_.result()["w"]

    orders = itertools.islice(itertools.permutations(range(5)), 0, 120, 17)
    first, *others = map(aggregate, orders)
    assert all(torch.equal(first, other) for other in others)


def test_krum_and_the_trimmed_mean_leave_the_outlier_out() -> None:
    rows = [torch.tensor(point) for point in POINTS]
    zero = {"w": torch.zeros(2)}
    assert any(torch.equal(play(Krum(), zero, rows)["w"], row) for row in rows[:4])
    two = play(MultiKrum(keep=2), zero, rows)["w"]
    assert float((two - torch.tensor([1.0, 2.0])).abs().max()) < 0.25
    assert play(TrimmedMean(share=0.2), zero, rows)["w"].tolist() == pytest.approx([1.1, 5.9 / 3])


def test_what_cannot_be_is_refused_by_name() -> None:
    quickstart = APP_ROOT / "experiments" / "quickstart.yaml"
    for name in ("krum", "multi_krum", "trimmed_mean"):
        with pytest.raises(ConfigError, match=f"secure: not with strategy '{name}'"):
            load_experiment(quickstart, [f"strategy={name}", "secure={}"])
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.momentum: found 0\.9; strategy scaffold"):
        load_experiment(quickstart, ["strategy=scaffold"])
    with pytest.raises(ValueError, match=r"share: found 0\.5, allowed 0 to below 0\.5"):
        TrimmedMean(share=0.5)


def short_run(tmp_path: Path, name: str, *changes: str) -> dict[str, Any]:
    overrides = ["tasks.rounds=1", "tasks.count=2", "learner.epochs=1", *changes]
    experiment = APP_ROOT / "experiments" / "rivals_digits.yaml"
    return run_in_process(
        RunSettings(str(experiment), json.dumps(overrides), name, str(tmp_path), device="cpu")
    )


def test_fedprox_by_name_is_fedavg_with_its_correction(tmp_path: Path) -> None:
    named = short_run(tmp_path, "named", "strategy={name: fedprox, mu: 0.1}")
    corrected = short_run(tmp_path, "set", "learner.correction={name: fedprox, mu: 0.1}")
    assert named["model_sha256"] == corrected["model_sha256"]


class Backwards(InProcessGrid):
    """The sites answer in the other order."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [*super().push_messages([*messages][::-1])][::-1]


@pytest.mark.parametrize(
    "name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad", "krum", "multi_krum", "trimmed_mean"]
)
def test_a_killed_run_that_goes_on_with_replies_in_another_order_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = {"source": "digits", "sites": 5, "samples_limit": 200, "partition": {"kind": "iid"}}
    settings = RunSettings(write(tmp_path, data=data, strategy=name), runs=str(tmp_path / "runs"))
    whole = run_in_process(replace(settings, runs=str(tmp_path / "whole")))
    # the third round is the first with the second task's classes, whose entries of the state are new
    with pytest.raises(Stop):
        run_in_process(settings, listener=stop_at(3))
    monkeypatch.setattr("perennial.engine.run.InProcessGrid", Backwards)
    resumed = run_in_process(replace(settings, resume="yes"))
    assert resumed["model_sha256"] == whole["model_sha256"]
