"""FedDig around other strategies: a stand-in counts as a site, and nothing is remembered of it as of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.feddyn import FedDyn
from perennial.strategies.fednova import FedNova
from perennial.strategies.round.gate import Admitted
from perennial.strategies.scaffold import Scaffold
from tests.rounds import begun

PROXIMAL = {
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "correction": {"name": "fedprox"},
    }
}
PLAIN_STEPS = {"learner": {"preset": "none", "optimizer": {"lr": 0.05}}}
SMALL: dict[str, Any] = {
    "name": "bases",
    "data": {"source": "digits", "sites": 3, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 2, "last_round": 2}],
    "evaluation": {"federated": False},
}
REFERENCE = {"w": torch.zeros(2)}


def run(folder: Path, base: object, **changes: Any) -> dict[str, Any]:
    path = folder / "experiment.yaml"
    strategy = {"name": "digest_synthesis", "base": base}
    path.write_text(yaml.safe_dump(SMALL | {"strategy": strategy} | changes))
    return run_in_process(RunSettings(str(path), runs=str(folder / "runs")))


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("fedavg", PROXIMAL),
        ("fednova", {}),
        ("feddyn", {}),
        ("adabest", {}),
        ("scaffold", PLAIN_STEPS),
        ("uniform_mean", {}),
        ({"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1}, {}),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) and "name" in value else str(value)[:20],
)
def test_an_absent_site_is_stood_in_for_under_every_base_that_combines_replies(
    tmp_path: Path, base: object, changes: dict[str, Any]
) -> None:
    summary = run(tmp_path, base, **changes)
    assert summary["digest"]["sites"]["site-1"]["rounds_stood_in"] == 1
    assert all(facts["rejected"] == 0 for facts in summary["sites"].values())


@pytest.mark.parametrize("base", ["feddisco", "serial_ring", "clustered_personalisation"])
def test_a_base_in_which_nobody_can_stand_in_is_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(ConfigError, match="base"):
        run(tmp_path, base)


def reply(site: str, value: float, steps: int, stand_in: bool = False) -> Admitted:
    update = {"w": torch.full((2,), value)}
    return Admitted(site, update, float(update["w"].norm()), 1, steps=steps, stand_in=stand_in)


def played(strategy: IncrementalStrategy, *replies: Admitted) -> torch.Tensor:
    round_ = begun(strategy, REFERENCE)
    for one in replies:
        round_.add(one)
    return round_.result()["w"]


def test_fednova_normalises_a_stand_in_by_its_own_steps() -> None:
    # 1 / 1 step and 4 / 2 steps: mean 1.5 of one step each, times 1.5 steps on average
    assert played(FedNova(), reply("a", 1.0, 1), reply("b", 4.0, 2, stand_in=True)).tolist() == [2.25, 2.25]


def test_what_a_stand_in_did_is_not_remembered_as_the_sites_work() -> None:
    dynamic = FedDyn()
    dynamic.population = {"a", "b"}
    there = reply("a", 1.0, 1)
    # the mean is 2; the server's vector moves by the update of the site that was there, over both sites
    assert played(dynamic, there, reply("b", 3.0, 1, stand_in=True)).tolist() == [2.5, 2.5]
    assert dynamic.memory["w"].tolist() == [-0.5, -0.5]
    further = FedDyn()
    further.population = {"a", "b"}
    played(further, reply("a", 2.0, 1), reply("b", 3.0, 1, stand_in=True))
    assert further.memory["w"].tolist() == [-1.0, -1.0]
    again = FedDyn()
    again.population = {"a", "b"}
    assert played(again, there, reply("b", 3.0, 1)).tolist() == [4.0, 4.0]


def test_a_stand_in_leaves_the_control_variates_as_they_are() -> None:
    strategy = Scaffold()
    strategy.population = {"a", "b"}
    strategy.local_lr = 0.5
    true, stand_in = reply("a", 1.0, 2), reply("b", 3.0, 2, stand_in=True)
    assert played(strategy, true, stand_in).tolist() == [2.0, 2.0]
    alone = Scaffold()
    alone.population = {"a", "b"}
    alone.local_lr = 0.5
    played(alone, true)
    assert torch.equal(strategy.memory["w"], alone.memory["w"])
    assert strategy.memory["w"].any()
    played(alone, replace(stand_in, stand_in=False))
    assert not torch.equal(strategy.memory["w"], alone.memory["w"])
