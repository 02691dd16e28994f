"""Global class means: sums of the sites' exemplar features, checked, accounted, and used by all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.foundation.streams import stream
from perennial.learning.evaluation import by_class_means
from perennial.models.incremental import IncrementalModel
from perennial.privacy.accountants import make_accountant
from perennial.protocol.messages import FinishTaskReply
from perennial.protocol.tensors import Tensors
from perennial.server.task_end import check_class_sums, global_means

EXPERIMENT: dict[str, Any] = {
    "name": "means",
    "seed": 2,
    "data": {"source": "digits", "sites": 2, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.1},
        "memory": {"per_class": 4},
        "classifier": "nearest_mean",
        "means": "global",
    },
}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 2.0}


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return run_in_process(RunSettings(str(path), runs=str(folder / "runs")))


def reply(sums: Tensor, counts: Tensor) -> FinishTaskReply:
    return FinishTaskReply(
        run="r",
        experiment="e",
        class_order="c",
        task=1,
        round=1,
        num_classes=len(counts),
        class_sums=Tensors(sums=sums, counts=counts),
    )


def test_means_by_hand_and_a_class_that_nobody_has_is_never_predicted() -> None:
    one = reply(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([2.0, 1.0, 0.0]))
    two = reply(torch.tensor([[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0, 0.0]))
    means = global_means({"b": two, "a": one})
    assert means is not None
    half = 0.5**0.5
    assert torch.allclose(means, torch.tensor([[half, half], [0.0, 1.0], [0.0, 0.0]]))
    assert torch.equal(means, global_means({"a": one, "b": two}))  # type: ignore[arg-type]
    assert global_means({}) is None
    model = IncrementalModel(torch.nn.Identity(), 2, 3, stream(1, "init"))
    predict = by_class_means(model, means)
    inputs = torch.tensor([[1.0, 0.9], [-0.1, 1.0], [-1.0, -1.0]])
    assert predict(inputs).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("sums", "counts", "reason"),
    [
        (torch.zeros(3, 2), torch.zeros(2), "class_sums.sums: found (3, 2), expected floats (2, 2)"),
        (torch.zeros(2, 2), torch.zeros(3), "class_sums.counts: found (3,), expected floats (2,)"),
        (torch.zeros(2, 2), torch.tensor([-1.0, 0.0]), "class_sums.counts: allowed whole numbers from 0"),
        (torch.zeros(2, 2), torch.tensor([0.5, 0.0]), "class_sums.counts: allowed whole numbers from 0"),
        (torch.ones(2, 2), torch.tensor([1.0, 2.0]), "class_sums.sums: longer than so many unit features"),
    ],
)
def test_sums_that_cannot_be_true_are_refused(sums: Tensor, counts: Tensor, reason: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(reason)):
        check_class_sums(reply(sums, counts), 2, 2, private=False)
    missing = FinishTaskReply(run="r", experiment="e", class_order="c", task=1, round=1, num_classes=2)
    with pytest.raises(ProtocolError, match="class_sums.sums: found nothing"):
        check_class_sums(missing, 2, 2, private=False)


def test_under_privacy_each_task_costs_one_release_more_and_is_in_the_ledger(tmp_path: Path) -> None:
    private = {"privacy": LOCAL, "evaluation": {"federated": False}}
    shared = run(tmp_path / "global", **private)
    accountant = make_accountant("prv")
    accountant.step(1.0, 1.0, 4 + 2)
    assert shared["epsilon"]["per_site"]["site-0"] == pytest.approx(accountant.epsilon(1e-5))
    own = run(tmp_path / "site", **private, learner=EXPERIMENT["learner"] | {"means": "site"})
    assert own["epsilon"]["value"] < shared["epsilon"]["value"]
    [ledger, *_] = sorted((tmp_path / "global").rglob("ledger.jsonl"))
    kinds = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()]
    assert kinds.count("class_means") == 2
    assert kinds.count("update") == 4


@pytest.mark.parametrize("mode", ["client_central", "sample"])
def test_a_protection_that_does_not_cover_the_sums_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.means: found 'global' with privacy.mode '{mode}'"):
        rate = {"sample_rate": 0.1} if mode == "sample" else {}
        run(tmp_path, privacy=LOCAL | rate | {"mode": mode}, evaluation={"federated": False})
