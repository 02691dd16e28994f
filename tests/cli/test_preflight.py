"""`check` and `run` refuse the same experiments, with the same words, and accept the same ones."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.cli.check import check_command
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import PerennialError

GOOD: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
CENTRAL = {**LOCAL, "mode": "client_central"}
SAMPLE = {**LOCAL, "mode": "sample", "sample_rate": 0.1}
UNMEASURED = {"evaluation": {"federated": False}}
BAD: dict[str, dict[str, Any]] = {
    "no such strategy": {"strategy": "fedvag"},
    "a key of a strategy": {"strategy": {"name": "scaffold", "server_lrr": 1}},
    "scaffold with momentum": {
        "strategy": "scaffold",
        "learner": {"preset": "none", "optimizer": {"lr": 0.1, "momentum": 0.9}},
    },
    "fednova that overshoots": {
        "strategy": "fednova",
        "learner": {"preset": "none", "optimizer": {"lr": 1.0}, "correction": {"name": "fedprox", "mu": 2.0}},
    },
    "an unbounded strategy under central noise": {
        "strategy": "uniform_mean",
        "privacy": CENTRAL,
        **UNMEASURED,
    },
    "a wrapper under central noise": {
        "strategy": {"name": "clustered_personalisation", "base": "fedavg", "global_rounds": 1},
        "privacy": CENTRAL,
        **UNMEASURED,
    },
    "a loss that couples samples": {
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "classification": "gradient_compensation"},
        "privacy": SAMPLE,
        **UNMEASURED,
    },
    "too many pre-training samples": {"pretraining": {"rounds": 2, "samples": 5000}},
    "a quorum of more sites than there are": {"rounds": {"quorum": 4, "deadline": 1}},
    "a start with more sites than there are": {"rounds": {"wait_for": 4, "deadline": 1}},
    "digests of nothing": {"strategy": {"name": "digest_synthesis", "base": "fedavg"}},
    "more global rounds than rounds": {
        "strategy": {"name": "clustered_personalisation", "base": "fedavg", "global_rounds": 9}
    },
    "more clusters than sites": {
        "strategy": {
            "name": "clustered_personalisation",
            "base": "fedavg",
            "global_rounds": 0,
            "grouping": "random",
            "clusters": 9,
        }
    },
    "images that are tables": {"model": {"name": "dual_backbone", "backbone": "no_such"}},
    "a memory that is too small": {
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "memory": {"fixed_total": 3}}
    },
    "a ring that freezes everything": {"strategy": {"name": "serial_ring", "freeze": 9, "relabel": "none"}},
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**deepcopy(GOOD), **deepcopy(changes)}))
    return path


@pytest.mark.parametrize("name", BAD)
def test_check_and_run_refuse_with_the_same_words(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, BAD[name])
    with pytest.raises(PerennialError) as checked:
        check_command(path, None)
    with pytest.raises(PerennialError) as started:
        run_in_process(RunSettings(str(path), runs=str(tmp_path), device="cpu"))
    assert (type(checked.value), str(checked.value)) == (type(started.value), str(started.value))
    assert not (tmp_path / "small").exists() or not (tmp_path / "small" / "events.jsonl").exists()


def test_what_check_accepts_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"pretraining": {"rounds": 1, "samples": 20}})
    check_command(path, None)
    assert "(2 rounds)" in capsys.readouterr().out
    assert run_in_process(RunSettings(str(path), runs=str(tmp_path), device="cpu"))["rounds"] == 3
