"""A Gaussian head over features that a gradient method learnt: exact sums, one head for all, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from perennial.client.handlers import answer_evaluate, answer_finish_task
from perennial.client.learnt_sums import _collected, as_tensors
from perennial.client.site import Site
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_federation
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, DataError, PolicyRefusal, ProtocolError
from perennial.learning.batches import TrainingSet, to_float
from perennial.learning.evaluation import by_class_means
from perennial.models.incremental import IncrementalModel
from perennial.models.saved import load_saved
from perennial.protocol.messages import EvaluateRequest, FinishTaskReply, FinishTaskRequest
from perennial.protocol.tensors import Tensors
from perennial.server.task_end import check_sums, gaussian_head
from tests.client.test_site_demands import arrays, entries, hospital, stamp

LEARNER: dict[str, Any] = {
    "preset": "none",
    "optimizer": {"lr": 0.1},
    "memory": {"per_class": 4},
    "classifier": "gaussian",
}
EXPERIMENT: dict[str, Any] = {
    "name": "learnt",
    "seed": 2,
    "data": {"source": "digits", "sites": 2, "samples_limit": 400, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": LEARNER,
}


def run(
    folder: Path, workers: int = 1, listener: Any = None, resume: str = "", **changes: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    settings = RunSettings(str(path), runs=str(folder / "runs"), device="cpu", resume=resume)
    return run_in_process(settings, workers, listener=listener)


def network(width: int, classes: int) -> IncrementalModel:
    return IncrementalModel(torch.nn.Identity(), width, classes, np.random.default_rng(1))


def samples(count: int, classes: int = 3, seed: int = 0) -> TrainingSet:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, 6, generator=generator) + 2 * torch.eye(6)[y]
    return TrainingSet(x, y, torch.zeros(6), torch.ones(6))


def reply(statistics: Tensors | None, classes: int = 3) -> FinishTaskReply:
    fields = {"run": "r", "experiment": "e", "class_order": "c", "task": 1, "round": 1}
    return FinishTaskReply(**fields, num_classes=classes, statistics=statistics)  # pyright: ignore


def test_head_is_that_of_all_samples_in_one_place_and_a_discriminant_analysis() -> None:
    model, data = network(6, 3), samples(120)
    rows = torch.arange(120)
    whole = {"one": reply(as_tensors(_collected(model, data, rows)))}
    parts = {f"site-{k}": reply(as_tensors(_collected(model, data, rows[k::4]))) for k in range(4)}
    found = gaussian_head(parts, 6, 1e-6)
    assert torch.equal(found, gaussian_head(whole, 6, 1e-6))
    unit = torch.nn.functional.normalize(data.x, dim=1).double().numpy()
    known = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3).fit(unit, data.y.numpy())
    predicted = by_class_means(model, found)(data.x)
    assert predicted.tolist() == np.asarray(known.predict(unit)).tolist()
    assert float((predicted == data.y).double().mean()) > 0.8


def test_sums_that_no_samples_have_are_refused() -> None:
    model, data = network(6, 3), samples(60)
    sums = as_tensors(_collected(model, data, torch.arange(60)))
    check_sums(reply(sums), 6)
    with pytest.raises(ProtocolError, match="found nothing, expected sums"):
        check_sums(reply(None), 6)
    with pytest.raises(ProtocolError, match="statistics: found"):
        check_sums(reply(sums), 7)
    with pytest.raises(ProtocolError, match="no samples have such sums"):
        check_sums(reply(Tensors(sums | {"counts": sums["counts"] + 1})), 6)
    with pytest.raises(DataError, match="found 3 samples of 3 classes"):
        gaussian_head({"one": reply(as_tensors(_collected(model, data, torch.arange(3))))}, 6, 0.1)
    with pytest.raises(DataError, match="no site sent sums"):
        gaussian_head({}, 6, 0.1)


def test_run_is_judged_by_it_and_its_file_classifies_by_it(tmp_path: Path) -> None:
    summary = run(tmp_path / "one")
    saved = load_saved(tmp_path / "one" / "runs" / "learnt" / "model.safetensors")
    assert saved.classifier_name == "gaussian"
    test = simulated_federation(load_experiment(tmp_path / "one" / "experiment.yaml")).test
    assert test is not None
    x, labels = test.x[test.test], test.y[test.test]
    with torch.no_grad():
        inputs = to_float(x, saved.inputs.mean, saved.inputs.std)
        predicted, by_head = saved.classifier(inputs).argmax(dim=1), saved.model(inputs).argmax(dim=1)
    right = float((predicted == labels).double().mean())
    assert right == pytest.approx(summary["final_accuracy"], abs=1e-12)
    assert not torch.equal(predicted, by_head)
    # it trains nothing: the network is the one that is judged by its head
    head = run(tmp_path / "head", learner=LEARNER | {"classifier": "head"})
    assert head["model_sha256"] == summary["model_sha256"]
    assert summary["final_accuracy"] > head["final_accuracy"]
    spread = run(tmp_path / "spread", workers=2)
    for key in ("model_sha256", "accuracy_matrix", "federated_accuracy"):
        assert spread[key] == summary[key]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"learner": {"preset": "none", "optimizer": {"lr": 0.1}, "classifier": "gaussian"}},
            "it needs `memory`",
        ),
        (
            {
                "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0},
                "evaluation": {"federated": False},
            },
            "found 'gaussian' with privacy.mode 'client_local'",
        ),
        ({"secure": {"least": 2}, "data": EXPERIMENT["data"] | {"sites": 3}}, "found 'gaussian' with secure"),
    ],
    ids=["no memory", "noise", "masks"],
)
def test_what_it_does_not_go_with_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "refused", **changes)


# a hospital


def finish(site: Site) -> FinishTaskReply:
    found = answer_finish_task(site, FinishTaskRequest(**stamp(site), arrays=arrays(site)))
    assert isinstance(found, FinishTaskReply)
    return found


ANSWERS = {"answers": ["train", "evaluate", "statistics"]}


def test_hospital_answers_by_its_policy_and_writes_the_release_down(tmp_path: Path) -> None:
    site = hospital(tmp_path / "open", ANSWERS, learner=LEARNER)
    found = finish(site).statistics
    assert found is not None and int(found["counts"].sum()) > 0
    assert [entry.kind for entry in entries(site)] == ["statistics"]
    for policy, said in (
        ({"answers": ["train", "evaluate"]}, "'statistics' is not answered here"),
        (ANSWERS | {"require_privacy": "sample", "max_epsilon": 8.0}, "sums of features leave without noise"),
    ):
        closed = hospital(tmp_path / f"closed-{len(policy)}", policy, learner=LEARNER)
        with pytest.raises(PolicyRefusal, match=said):
            finish(closed)
        assert entries(closed) == () and not (closed.identity.state_dir / "runs").exists()


def test_classes_below_the_floor_are_in_no_sum(tmp_path: Path) -> None:
    whole = finish(hospital(tmp_path / "whole", ANSWERS, learner=LEARNER)).statistics
    assert whole is not None
    counts = whole["counts"].tolist()
    least = 7
    few = finish(hospital(tmp_path / "few", ANSWERS | {"min_samples": least}, learner=LEARNER)).statistics
    assert few is not None
    kept = few["counts"].tolist()
    assert all(count in (0, before) for count, before in zip(kept, counts, strict=True))
    assert sum(kept) > 0 and all(count == 0 or count >= least for count in kept)
    assert any(0 < count < least for count in counts), "some class is below the floor"
    assert not few["sums"][few["counts"] == 0].any()


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    site = hospital(tmp_path, ANSWERS, learner=LEARNER)
    classes, width = stamp(site)["num_classes"], 8

    def answer(**rows: torch.Tensor) -> Any:
        request = EvaluateRequest(**stamp(site), arrays=arrays(site), class_means=Tensors(rows))
        return answer_evaluate(site, request)

    answer(gaussian=torch.ones(classes, width + 1))
    for rows in (
        {"gaussian": torch.ones(classes, width)},
        {"means": torch.ones(classes, width + 1)},
        {"gaussian": torch.ones(classes, width + 1), "means": torch.ones(classes, width)},
    ):
        with pytest.raises(ProtocolError, match="EvaluateRequest: class_means: found"):
            answer(**rows)
