"""The figure for a typical record where the noise is drawn at the site: estimated there, kept there, shown
beside the worst case."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from perennial.cli.privacy import ledger_command
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.learning.batches import TrainingSet
from perennial.learning.bayesian_estimate import FILE, NeighbourDistances, read_bayesian_figure, split_halves
from perennial.privacy.bayesian import BayesianAccountant
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.sample_level import PrivateGradient
from tests.seeded_noise import SeededNoise

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "epochs": 1,
        "batch_size": 16,
        "optimizer": {"lr": 0.005},
        "classification": "ce",
    },
    "evaluation": {"federated": False},
}
SAMPLE = {
    "mode": "sample",
    "clip_norm": 40.0,
    "noise_multiplier": 2.0,
    "sample_rate": 0.25,
}
LOCAL = {"mode": "client_local", "clip_norm": 4.0, "noise_multiplier": 8.0}


def settings(folder: Path, **changes: Any) -> RunSettings:
    content = SMALL | changes
    path = folder / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump(content))
    return RunSettings(str(path), runs=str(folder / "runs"))


def samples(count: int, exemplars: int = 0) -> TrainingSet:
    y = torch.arange(count)
    return TrainingSet(y[:, None].float(), y, torch.zeros(1), torch.ones(1), exemplars)


@pytest.mark.parametrize("privacy", [SAMPLE, LOCAL], ids=lambda privacy: privacy["mode"])
def test_it_stands_beside_the_worst_case_in_the_summary_the_report_and_the_ledger(
    tmp_path: Path, privacy: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plain: dict[str, Any] = run_in_process(settings(tmp_path, privacy=privacy, name="plain"))
    summary: dict[str, Any] = run_in_process(settings(tmp_path, privacy=privacy | {"bayesian": True}))
    epsilon = summary["epsilon"]
    assert plain["epsilon"]["bayesian"] is None
    assert epsilon["value"] == plain["epsilon"]["value"]
    assert 0 < epsilon["bayesian"] < epsilon["value"]
    assert epsilon["claim"]["bayesian_epsilon"] == epsilon["bayesian"]
    # estimating it changes nothing of what is released
    assert summary["model_sha256"] == plain["model_sha256"]
    folder = tmp_path / "runs" / "small"
    assert epsilon["claim"]["bayesian_relation"] in (folder / "report.html").read_text()
    ledger_command(folder / "sites" / "site-0", 1e-5, None)
    out = capsys.readouterr().out
    releases = 2 * (math.ceil(1 / 0.25) if privacy is SAMPLE else 1)
    assert "typical record epsilon" in out and f"({releases} of {releases} planned" in out


def test_no_message_carries_it(tmp_path: Path) -> None:
    run_in_process(settings(tmp_path, privacy=SAMPLE | {"bayesian": True}))
    folder = tmp_path / "runs" / "small"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if "bayesian" in json.dumps(event.get("details", {}))]
    assert len(list(folder.glob(f"sites/*/runs/*/{FILE}"))) == 3


def test_every_step_is_an_invocation_and_one_more_than_planned_ends_the_figure(
    tmp_path: Path,
) -> None:
    privacy = PrivacyConfig.model_validate(SAMPLE | {"bayesian": True})
    experiment = load_experiment(Path(settings(tmp_path).experiment)).model_copy(update={"privacy": privacy})
    path = tmp_path / "runs" / "r" / FILE
    record = NeighbourDistances(path, experiment, 1, 24, np.random.default_rng(1))
    for _ in range(4):
        record.see(torch.full((24,), 0.5))
    record.keep()
    found = read_bayesian_figure(tmp_path, "r")
    assert found is not None and (found.invocations, found.planned, found.void) == (4, 4, "")
    by_hand = BayesianAccountant(4)
    for _ in range(4):
        by_hand.accumulate([0.5] * 24, 80.0, 0.25)
    assert found.epsilon == pytest.approx(by_hand.epsilon(1e-5))
    record.see(torch.full((24,), 0.5))
    record.keep()
    found = read_bayesian_figure(tmp_path, "r")
    assert found is not None and found.epsilon is None and "planned for 4" in found.void


def test_a_record_moves_the_sum_by_its_clipped_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    privacy = PrivacyConfig(mode="sample", clip_norm=1.0, noise_multiplier=1.0, sample_rate=0.5)

    def losses(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")

    source = SeededNoise(np.random.default_rng(1))
    with PrivateGradient(model, privacy, expected_batch=4, source=source) as private:
        found = private.measure_clipped_norms(torch.arange(7), losses)
        assert all(parameter.grad is None for parameter in model.parameters())
    expected = []
    for row in range(7):
        gradients = torch.autograd.grad(losses(torch.tensor([row])).sum(), list(model.parameters()))
        expected.append(min(1.0, math.sqrt(sum(float(part.square().sum()) for part in gradients))))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) > 1


def test_halves_are_disjoint_and_whole() -> None:
    one, other = split_halves(samples(7, exemplars=2), np.random.default_rng(1))
    assert set(one.y.tolist()).isdisjoint(other.y.tolist())
    assert sorted([*one.y.tolist(), *other.y.tolist()]) == sorted(2 * list(range(7)))
    for half in (one, other):
        assert all(half.y[len(half) - half.exemplars :] >= 5) and all(
            half.y[: len(half) - half.exemplars] < 5
        )
    assert split_halves(samples(1), np.random.default_rng(1)) == []
