"""The baselines in whole small runs, and under Flower's own loop with a client that knows nothing of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvgM

from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.strategies.factory import build_strategy

SMALL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "batch_size": 16, "optimizer": {"lr": 0.05}, "memory": {"per_class": 3}},
}
OURS = ["adabest", "cyclic_weight_transfer", "feddisco", "feddyn", "fednova", "scaffold", "target"]


class Killed(Exception):
    pass


def settings(folder: Path, resume: str = "", **changes: Any) -> RunSettings:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return RunSettings(str(path), runs=str(folder), resume=resume, device="cpu")


def named(name: str) -> object:
    smaller = {"target": {"steps": 2, "samples": 8}}
    return {"name": name, **smaller[name]} if name in smaller else name


def sha(folder: Path, workers: int = 1, **changes: Any) -> object:
    return run_in_process(settings(folder, **changes), workers)["model_sha256"]


def killer(event: str, key: str, value: int) -> Callable[[dict[str, Any]], None]:
    def listener(entry: dict[str, Any]) -> None:
        if entry["event"] == event and entry.get(key) == value:
            raise Killed

    return listener


@pytest.mark.parametrize("name", OURS)
def test_a_stopped_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = sha(tmp_path / "whole", strategy=named(name))
    stopped = tmp_path / "stopped"
    # before the second round of a task, and before the first of one
    for number in (2, 3, 4):
        again = settings(stopped, resume="yes" if number > 2 else "", strategy=named(name))
        with pytest.raises(Killed):
            run_in_process(again, listener=killer("round", "round", number))
    resumed = run_in_process(settings(stopped, resume="yes", strategy=named(name)))
    assert resumed["model_sha256"] == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_two_workers_give_the_same_bits(name: str, tmp_path: Path) -> None:
    assert sha(tmp_path / "one", strategy=named(name)) == sha(
        tmp_path / "two", workers=2, strategy=named(name)
    )


def test_label_counts_are_refused_under_privacy(tmp_path: Path) -> None:
    from perennial.foundation.errors import PrivacyError

    privacy = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}
    faulty = settings(
        tmp_path,
        strategy="feddisco",
        privacy=privacy | {"delta": 1e-5},
        evaluation={"federated": False},
        learner={**SMALL["learner"], "memory": None},  # type: ignore[dict-item]
    )
    with pytest.raises(PrivacyError, match="replies carry label_counts beside the update"):
        run_in_process(faulty)


def half_way_to_three(message: Message, context: Context) -> Message:
    """A ClientApp by Flower's convention: the whole model back, and how many samples."""
    arrays = ArrayRecord({"w": Array((message.content.array_records["arrays"]["w"].numpy() + 3) / 2)})
    metrics = MetricRecord({"num-examples": 10, "num-steps": 2})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def test_flowers_own_server_momentum_of_0_and_step_of_1_is_fedavg() -> None:
    start = ArrayRecord({"w": Array(torch.ones(2).numpy())})
    minima: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    theirs = FedAvgM(server_learning_rate=1.0, server_momentum=0.0, **minima)
    ends = []
    for strategy in (theirs, build_strategy("fedavg", {})):
        grid = InProcessGrid(half_way_to_three, build_site_contexts(2, {}))
        ends.append(strategy.start(grid, start, num_rounds=3).arrays["w"].numpy())
    assert ends[1] == pytest.approx(ends[0], abs=1e-6)
    assert ends[1] == pytest.approx(3 - 2 * 0.5**3, abs=1e-6)
