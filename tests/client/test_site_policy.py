"""What a site's own policy and ledger refuse, whatever the messages say and whatever the machine does."""

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.client.identity import Identity
from perennial.client.policy import check_evaluation, check_floor, check_update
from perennial.client.release import leave, pay
from perennial.client.site import Site
from perennial.client.training_turn import protect
from perennial.config import charges
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.site import SitePolicy, load_site_config
from perennial.foundation.errors import ConfigError, PolicyRefusal, PrivacyError, StateError
from perennial.learning.training import TrainingResult
from perennial.privacy import ledger as ledger_module
from perennial.privacy.accountants import make_accountant
from perennial.privacy.ledger import Ledger
from perennial.privacy.released import Public, Released
from perennial.protocol.messages import TrainReply, TrainRequest
from perennial.protocol.tensors import Tensors
from tests.privacy.budgets import budget_for

LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 8.0}
STAMP: dict[str, Any] = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 1,
    "num_classes": 2,
}


def experiment(folder: Path, privacy: dict[str, Any]) -> Experiment:
    path = folder / "experiment.yaml"
    content = {
        "name": "policy",
        "data": {"source": "digits", "sites": 2},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "mlp", "hidden": [4]},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
        "privacy": privacy,
        "evaluation": {"federated": False},
    }
    path.write_text(yaml.safe_dump(content))
    return load_experiment(path)


def site(folder: Path, privacy: dict[str, Any], policy: SitePolicy) -> Site:
    identity = Identity("a", experiment(folder, privacy), policy, folder / "state", "cpu", 1, deployed=True)
    without_data: Any = None
    return Site(identity, without_data)


def release(place: Site, number: int = 1, length: float = 3.0) -> Any:
    request = TrainRequest(**STAMP, round=number, arrays=Tensors({}))
    update = torch.zeros(10)
    update[0] = length
    result = TrainingResult(update, loss=1.0, steps=7)
    mechanism = charges.price_update(place.experiment, request.run)
    protect(place, mechanism, result)
    leave(
        place.identity, request, TrainReply, update=Released(Tensors({}), mechanism), num_examples=Public(1)
    )
    return update


def charge(place: Site, run: str, *, of_update: bool) -> None:
    cost = charges.price_update if of_update else charges.price_evaluation
    pay(place.identity, Released(0, cost(place.experiment, run)))


def test_the_protection_that_must_be_on(tmp_path: Path) -> None:
    policy = SitePolicy(require_privacy="sample", max_epsilon=8.0)
    for another in ({"mode": "none"}, LOCAL):
        with pytest.raises(PolicyRefusal, match="demands 'sample'"):
            check_update(policy, experiment(tmp_path, another))
    check_update(policy, experiment(tmp_path, LOCAL | {"mode": "sample", "sample_rate": 0.1}))


@pytest.mark.parametrize("demanded", ["client_local", "client_central", "sample"])
def test_a_protection_that_is_demanded_needs_a_budget(tmp_path: Path, demanded: str) -> None:
    path = tmp_path / "site.yaml"
    content: dict[str, Any] = {"site": "a", "state_dir": "state", "policy": {"require_privacy": demanded}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=rf"site\.yaml.*max_epsilon: missing.*{demanded}"):
        load_site_config(path)
    for endless in (None, float("inf")):
        content["policy"]["max_epsilon"] = endless
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match="max_epsilon"):
            load_site_config(path)
    content["policy"]["max_epsilon"] = 8.0
    path.write_text(yaml.safe_dump(content))
    assert load_site_config(path).policy.require_privacy == demanded


def test_too_few_samples_are_refused_without_their_number() -> None:
    with pytest.raises(PolicyRefusal, match="fewer than 50") as refusal:
        check_floor(SitePolicy(min_samples=50), "update", 49)
    assert "49" not in str(refusal.value)


def test_counts_of_an_evaluation_do_not_leave_beside_protected_updates(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefusal, match="counts of right answers"):
        check_evaluation(SitePolicy(), experiment(tmp_path, LOCAL))
    check_evaluation(SitePolicy(), experiment(tmp_path, {"mode": "none"}))


def test_a_protected_update_is_noised_in_every_value(tmp_path: Path) -> None:
    update = release(site(tmp_path, LOCAL, SitePolicy()))
    assert torch.count_nonzero(update) == 10


def test_the_lifetime_budget_holds_over_runs(tmp_path: Path) -> None:
    one = charges.price_update(experiment(tmp_path, LOCAL), "first run").entry
    two = budget_for([one, one], 1e-5).epsilon
    place = site(tmp_path, LOCAL, SitePolicy(max_epsilon=two + 0.01))
    charge(place, "first run", of_update=True)
    charge(place, "second run", of_update=True)
    with pytest.raises(PrivacyError, match="lifetime epsilon"):
        charge(place, "third run", of_update=True)
    assert len(Ledger(place.identity.state_dir).read_entries()) == 2


def test_an_update_in_the_clear_does_not_fit_any_budget(tmp_path: Path) -> None:
    place = site(tmp_path, {"mode": "none"}, SitePolicy(max_epsilon=1000.0))
    with pytest.raises(PrivacyError, match="inf"):
        charge(place, "run", of_update=True)
    with pytest.raises(PrivacyError, match="evaluation"):
        charge(place, "run", of_update=False)


@pytest.mark.parametrize("jump", [timedelta(days=-4000), timedelta(days=4000)])
def test_a_clock_that_jumps_changes_no_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    place = site(tmp_path, LOCAL, SitePolicy())
    charge(place, "run", of_update=True)

    class Jumped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Jumped":
            return cls.fromtimestamp((datetime.now(UTC) + jump).timestamp(), tz)

    monkeypatch.setattr(ledger_module, "datetime", Jumped)
    charge(place, "run", of_update=True)
    book = Ledger(place.identity.state_dir)
    assert len(book.read_entries()) == 2
    expected = make_accountant("prv", [(4.0, 1.0, 2)]).epsilon(1e-5)
    assert book.cost(1e-5).epsilon == pytest.approx(expected)


def test_on_a_full_disk_nothing_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = site(tmp_path, LOCAL, SitePolicy())
    charge(place, "run", of_update=True)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.os, "write", full)
        with pytest.raises(StateError, match="must not leave"):
            release(place, number=2)
    assert len(Ledger(place.identity.state_dir).read_entries()) == 1
    charge(place, "run", of_update=True)
    assert len(Ledger(place.identity.state_dir).read_entries()) == 2
