"""A network that learns in the first tasks and is fixed from then on: later classes by exact sums alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.learnt_sums import _collected
from perennial.config.experiment import load_experiment
from perennial.config.simulation import simulated_federation
from perennial.foundation.errors import ConfigError
from perennial.learning.analytic.solve import Sums, gaussian
from perennial.learning.batches import TrainingSet
from perennial.models.saved import SavedModel, load_saved
from tests.learning.test_gaussian_classifier import LEARNER, run

WITHOUT_MEMORY: dict[str, Any] = {
    "preset": "none",
    "optimizer": {"lr": 0.1},
    "classifier": "gaussian",
    "freeze_after": 1,
}
THREE: dict[str, Any] = {"tasks": {"count": 3, "rounds": 2}}


def saved(folder: Path) -> SavedModel:
    return load_saved(folder / "runs" / "learnt" / "model.safetensors")


def rows_of(model: SavedModel) -> torch.Tensor:
    assert model.class_means is not None
    return model.class_means


def network_of(model: SavedModel) -> dict[str, torch.Tensor]:
    return dict(model.model.backbone.state_dict())


def test_nothing_trains_later_and_the_head_is_that_of_all_samples(tmp_path: Path) -> None:
    summary = run(tmp_path / "three", learner=WITHOUT_MEMORY, **THREE)
    assert summary["rounds"] == 2
    found = saved(tmp_path / "three")
    federation = simulated_federation(load_experiment(tmp_path / "three" / "experiment.yaml"))
    parts = []
    for site in federation.sites.values():
        rows = site.part("train")
        data = TrainingSet(site.x[rows], site.y[rows], federation.mean, federation.std)
        parts.append(_collected(found.model, data, torch.arange(len(rows))))
    head = gaussian(Sums.of(parts[0] + parts[1]), 0.1).tensors()
    expected = torch.cat([head["head.weight"], head["head.bias"][:, None]], dim=1)
    assert torch.equal(rows_of(found), expected)

    one = run(tmp_path / "one", learner=LEARNER, **THREE)
    assert one["rounds"] == 6
    changed, fixed = network_of(saved(tmp_path / "one")), network_of(found)
    assert not all(torch.equal(changed[name], fixed[name]) for name in fixed)


def test_a_killed_run_goes_on_to_the_same_head(tmp_path: Path) -> None:
    def die(event: dict[str, Any]) -> None:
        if event["event"] == "task_started" and event["task"] == 3:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"learner": LEARNER | {"freeze_after": 2}, **THREE}
    summary = run(tmp_path / "whole", **settings)
    assert summary["rounds"] == 4
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", listener=die, **settings)
    run(tmp_path / "killed", resume=str(tmp_path / "killed" / "runs" / "learnt"), **settings)
    assert torch.equal(rows_of(saved(tmp_path / "whole")), rows_of(saved(tmp_path / "killed")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learner": WITHOUT_MEMORY | {"freeze_after": 2}}, "needs `memory`, or `freeze_after: 1`"),
        (
            {"learner": {"preset": "none", "optimizer": {"lr": 0.1}, "freeze_after": 1}},
            "freeze_after: found 1, allowed with classifier gaussian",
        ),
        ({"learner": WITHOUT_MEMORY, "model": {"name": "dual_backbone", "backbone": "mlp"}}, "dual_backbone"),
    ],
    ids=["exemplars until then", "another classifier", "two networks"],
)
def test_what_it_does_not_go_with_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "refused", **changes)
