"""Each site's own head from sums that the server has: what it is, who chooses it, and where it is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.own_model import answer_personal_model
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PolicyRefusal
from perennial.learning.analytic.solve import Sums, gaussian, ridge
from perennial.learning.analytic.statistics import Collector
from perennial.models.factory import build_model
from perennial.models.feature_maps.ball import on_grid
from perennial.models.incremental import travelling
from perennial.models.saved import load_saved, model_file
from perennial.protocol.messages import PersonalModelReply, PersonalModelRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic import Analytic
from perennial.strategies.own_heads import OwnHeads
from perennial.strategies.statistics.heads import Criterion
from tests.client.test_site_demands import entries, hospital, stamp
from tests.strategies.test_analytic_runs import own_cache, run, sums_of  # noqa: F401

DATA = {"partition": {"kind": "dirichlet", "alpha": 0.3, "min_samples": 20}, "validation_fraction": 0.3}
TASKS = {"count": 2, "rounds": 1}
BASE = {"name": "analytic", "head": "ridge", "shrinkage": 0.01}


def own(folder: Path, name: str, workers: int = 1, resume: str = "", **changes: Any) -> dict[str, Any]:
    settings = {"data": DATA, "tasks": TASKS, "strategy": {"name": "own_heads", "base": BASE}} | changes
    return run(folder, name, workers, resume, **settings)


@pytest.mark.parametrize("head", ["gaussian", "ridge"])
def test_kappa_is_how_often_a_sites_samples_count_more(head: str) -> None:
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(60) % 3
    x = on_grid(torch.randn(60, 5, generator=generator) + 2 * torch.eye(5)[y])
    mine = torch.arange(60) < 25

    def sums(*rows: torch.Tensor) -> Sums:
        collector = Collector(5, range(3))
        for part in rows:
            collector.add(x[part], y[part])
        return Sums.of(collector.finish())

    everybody = torch.ones(60, dtype=torch.bool)
    mixed = sums(everybody).with_more(sums(mine), 2.0)
    drawn_thrice = sums(everybody, mine, mine)
    for one, other in zip(_parts(mixed, head), _parts(drawn_thrice, head), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def _parts(sums: Sums, head: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = gaussian(sums, 0.2) if head == "gaussian" else ridge(sums, 0.1, standardise=True)
    return found.weight, found.bias


def test_counts_of_validation_choose_and_ties_go_to_the_head_of_all() -> None:
    cases: tuple[tuple[Criterion, int], ...] = (("balanced", 2), ("plain", 1))
    for criterion, expected in cases:
        strategy = OwnHeads(Analytic("ridge", 0.01, criterion=criterion), (1.0, 3.0))
        assert strategy.kappas == (0.0, 1.0, 3.0)
        correct, total = torch.tensor([[2, 0, 0], [9, 0, 0], [5, 1, 0]]), torch.tensor([10, 1, 0])
        assert strategy._best(correct, total) == expected
        assert strategy._best(torch.tensor([[1, 1, 0]] * 3), total) == 0
        assert strategy._best(torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)) == 0


def test_sites_keep_their_own_model_and_the_model_of_all_stays(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", data=DATA, tasks=TASKS, strategy=BASE)
    summary = own(tmp_path, "own")
    assert sums_of(summary) == sums_of(plain) and summary["model_sha256"] == plain["model_sha256"]
    assert summary["accuracy_matrix"] == plain["accuracy_matrix"]
    kappa = summary["own_heads"]["kappa"]
    assert set(kappa) == {"1", "2"} and set(kappa["2"]) == {f"site-{k}" for k in range(4)}
    assert any(kappa["2"].values()), "some site is better off with a head of its own"
    folder = tmp_path / "runs" / "own"
    whole = load_saved(folder / "model.safetensors").model.head.weight
    for site, value in kappa["2"].items():
        assert len(summary["personalised_accuracy"][site]) == 2
        mine = load_saved(model_file(folder, site)).model.head.weight
        assert torch.equal(mine, whole) == (value == 0)
    accuracies = [row[-1] for row in summary["personalised_accuracy"].values()]
    assert sum(accuracies) / 4 > 0.5
    again = own(tmp_path, "spread", workers=2)
    for key in ("own_heads", "personalised_accuracy", "personal_models_sha256"):
        assert again[key] == summary[key]


def test_a_resumed_run_knows_what_was_chosen(tmp_path: Path) -> None:
    summary = own(tmp_path, "whole")

    def die(event: dict[str, Any]) -> None:
        if event["event"] == "task_finished" and event["task"] == 1:
            raise KeyboardInterrupt

    path = tmp_path / "whole.yaml"
    with pytest.raises(KeyboardInterrupt):
        run_in_process(
            RunSettings(str(path), name="killed", runs=str(tmp_path / "runs"), device="cpu"), listener=die
        )
    again = own(tmp_path, "killed", resume=str(tmp_path / "runs" / "killed"))
    for key in ("own_heads", "personalised_accuracy", "personal_models_sha256", "model_sha256"):
        assert again[key] == summary[key]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"strategy": {"name": "own_heads", "base": "fedavg"}},
            "found FedAvg, which has no sums of features",
        ),
        ({"strategy": {"name": "own_heads", "base": BASE, "kappas": [0.0]}}, "kappas: found"),
        (
            {"strategy": {"name": "own_heads", "base": BASE | {"head": "balanced_ridge"}}},
            "a coalition's model needs each site's own sums",
        ),
        (
            {"strategy": {"name": "own_heads", "base": BASE | {"keep_sites": False}}},
            "a coalition's model needs each site's own sums",
        ),
        ({"data": DATA | {"validation_fraction": 0.0}}, "data.validation_fraction 0 leaves no samples"),
        ({"secure": {"least": 2}}, "a site's own head takes its own sums"),
        ({"rounds": {"asynchronous": True}}, "no round in which all have answered"),
        (
            {
                "privacy": {
                    "mode": "sample",
                    "release": "sums",
                    "noise_multiplier": 1.0,
                    "accountant": "rdp",
                },
                "strategy": {"name": "own_heads", "base": BASE | {"standardise": False}},
                "evaluation": {"federated": False},
            },
            "under privacy its sums have noise",
        ),
    ],
    ids=["base", "kappas", "balanced", "unkept", "no validation", "masks", "asynchronous", "noise"],
)
def test_what_it_does_not_go_with_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own(tmp_path, "refused", **changes)


def test_a_hospital_answers_it_with_statistics(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": {"name": "features", "features": [{"name": "random", "width": 20}]},
        "strategy": {"name": "own_heads", "base": BASE},
        "data": {
            "source": "digits",
            "sites": 3,
            "samples_limit": 240,
            "partition": {"kind": "iid"},
            "validation_fraction": 0.2,
        },
        "tasks": {"count": 2, "rounds": 1},
        "evaluation": {"federated": True},
    }

    def answer(folder: str, answers: list[str]) -> tuple[Any, Any]:
        site = hospital(tmp_path / folder, {"answers": answers}, **{**changes, "learner": None})
        model = build_model(
            site.experiment.model,
            site.data.input_shape,
            stamp(site)["num_classes"],
            1,
            constants=(site.data.mean, site.data.std),
        )
        arrays = Tensors({name: tensor.clone() for name, tensor in travelling(model).items()})
        return site, answer_personal_model(site, PersonalModelRequest(**stamp(site), arrays=arrays))

    site, reply = answer("open", ["statistics", "evaluate"])
    assert isinstance(reply, PersonalModelReply) and sum(reply.total or []) > 0
    assert (site.identity.state_dir / "personal_model.safetensors").exists()
    assert [entry.kind for entry in entries(site)] == ["evaluation"]
    with pytest.raises(PolicyRefusal, match="'statistics' is not answered here"):
        answer("closed", ["train", "evaluate"])


def test_more_than_an_hour_of_solves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.strategies.valuation.solved.MOST_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="strategy: 24 solves of 61 features would take about"):
        own(tmp_path, "long")
