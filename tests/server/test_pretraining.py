"""Balanced pre-training: the same number from each site, evenly over its classes, by plain averaging."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError

EXPERIMENT = {
    "name": "pre",
    "seed": 2,
    "data": {"source": "digits", "sites": 2, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 2}},
    "strategy": {"name": "layer_attention"},
    "pretraining": {"samples": 10, "rounds": 2},
}


def run(folder: Path, **changes: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    summary = run_in_process(RunSettings(str(path), runs=str(folder / "runs")))
    lines = (folder / "runs" / "pre" / "events.jsonl").read_text().splitlines()
    return summary, [event for event in map(json.loads, lines) if event["event"] == "round"]


def test_the_paper_leaves_its_samples_out_of_the_rest_of_task_1(tmp_path: Path) -> None:
    samples = []
    for exclude in (False, True):
        changed = {"samples": 10, "rounds": 1, "exclude": exclude}
        summary, _ = run(
            tmp_path / str(exclude), pretraining=changed, tasks={"increments": [10], "rounds": 1}
        )
        samples.append([site["samples"] for site in summary["sites"].values()])
    assert [all_of - rest for all_of, rest in zip(*samples, strict=True)] == [10, 10]


def test_a_site_that_has_fewer_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pretraining\.samples: found 500, but site 'site-0' has"):
        run(tmp_path, pretraining={"samples": 500})


@pytest.mark.parametrize("mode", ["client_central", "sample"])
def test_it_does_not_go_with_protections_that_it_would_bypass(tmp_path: Path, mode: str) -> None:
    rate = {"sample_rate": 0.1} if mode == "sample" else {}
    privacy = {"mode": mode, "clip_norm": 1.0, "noise_multiplier": 1.0, **rate}
    with pytest.raises(ConfigError, match=f"pretraining: not with privacy.mode '{mode}'"):
        run(tmp_path, privacy=privacy, evaluation={"federated": False})
