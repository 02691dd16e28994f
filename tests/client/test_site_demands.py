"""Whatever a server asks, what leaves a hospital has the protection that its site.yaml demands, or does not
leave."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.cli.check import check_command
from perennial.client.handlers import answer_evaluate, answer_train
from perennial.client.identity import Identity
from perennial.client.site import Site, open_site
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PerennialError, PolicyRefusal, PrivacyError
from perennial.models.digest_networks import FeatureEncoder, hash_encoder
from perennial.models.factory import build_model
from perennial.models.incremental import select_travelling
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.protocol.measurements import LABEL_COUNTS
from perennial.protocol.messages import (
    DigestRequest,
    EvaluateRequest,
    PersonalModelRequest,
    SparsityRequest,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors
from perennial.strategies.clustered_personalisation.site import answer_personal_model, answer_sparsity
from perennial.strategies.digest_synthesis.site import answer_digest

EXPERIMENT: dict[str, Any] = {
    "name": "demands",
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "batch_size": 8},
    "evaluation": {"federated": False},
}
SAMPLE = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.2}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 100.0}
CENTRAL = LOCAL | {"mode": "client_central"}
OF_MODE = {"sample": SAMPLE, "client_local": LOCAL, "client_central": CENTRAL}
DIGESTS = {"per_digest": 4, "protection": "laplace", "epsilon": 2.0, "largest": 1.0}
HIDDEN_LABELS = {"label_epsilon": 1.0}
READS_DIGESTS = {
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
}
ALL = ["train", "evaluate", "digest", "sparsity"]


def hospital(folder: Path, policy: dict[str, Any], **changes: Any) -> Site:
    experiment = Experiment.model_validate(EXPERIMENT | changes)
    rules = SitePolicy.model_validate({"answers": ALL} | policy)
    return open_site(Identity("site-1", experiment, rules, folder / "state", "cpu", 1, deployed=True))


def stamp(site: Site) -> dict[str, Any]:
    schedule = site.process.registry.schedule
    return {
        "run": "0123456789abcdef",
        "experiment": site.experiment.digest,
        "class_order": site.process.registry.order_hash,
        "task": 1,
        "round": 1,
        "num_classes": schedule.num_classes(1),
    }


def arrays(site: Site) -> Tensors:
    model = build_model(site.experiment.model, site.data.input_shape, stamp(site)["num_classes"], 1)
    return Tensors({name: tensor.clone() for name, tensor in select_travelling(model).items()})


def train(site: Site, **fields: Any) -> TrainReply:
    reply = answer_train(site, TrainRequest(**stamp(site), arrays=arrays(site), **fields))
    assert isinstance(reply, TrainReply)
    return reply


def evaluate(site: Site) -> Any:
    return answer_evaluate(site, EvaluateRequest(**stamp(site), arrays=arrays(site)))


def own_model(site: Site) -> Any:
    return answer_personal_model(site, PersonalModelRequest(**stamp(site), arrays=arrays(site)))


def digest(site: Site) -> Any:
    encoder = FeatureEncoder(site.data.input_shape, site.experiment.seed)
    return answer_digest(site, DigestRequest(**stamp(site), encoder=hash_encoder(encoder)))


def sparsity(site: Site) -> Any:
    return answer_sparsity(site, SparsityRequest(**stamp(site), arrays=arrays(site)))


def clusters(**keys: Any) -> dict[str, Any]:
    return {"strategy": {"name": "pfa", "global_rounds": 1, "layer": 1, "channels": 2, **keys}}


def entries(site: Site) -> tuple[Entry, ...]:
    return Ledger(site.identity.state_dir).read_entries()


def demanding(kind: str, budget: float = 8.0) -> dict[str, Any]:
    return {"require_privacy": kind, "max_epsilon": budget}


def refused(answer: Callable[[Site], Any], site: Site, error: type[PerennialError], reason: str) -> None:
    """Nothing is computed for a refusal, charged for it or kept."""
    with pytest.raises(error, match=reason):
        answer(site)
    assert entries(site) == ()
    assert not (site.identity.state_dir / "runs").exists()


@pytest.mark.parametrize("kind", ["client_local", "client_central", "sample"])
def test_the_protection_demanded_is_answered_and_charged(tmp_path: Path, kind: str) -> None:
    site = hospital(tmp_path, demanding(kind, 60.0), privacy=OF_MODE[kind])
    assert train(site).num_examples == 1
    (entry,) = entries(site)
    assert (entry.mechanism, entry.protected) == ("gaussian", True)


def test_measurements_are_not_told_under_a_protection(tmp_path: Path) -> None:
    site = hospital(tmp_path, {}, privacy=SAMPLE)
    refused(
        lambda s: train(s, settings=json.dumps({"tell": [LABEL_COUNTS]})), site, PrivacyError, LABEL_COUNTS
    )


LEARNER = EXPERIMENT["learner"]
TURN = {"sweep": 1, "segments": 1}


@pytest.mark.parametrize("policy", [{}, demanding("sample")])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"learner": LEARNER | {"memory": {"selection": "herding", "per_class": 4}}}, "memory.selection"),
        ({"learner": LEARNER | {"memory": {"selection": "random", "per_class": 4}}}, "memory.share"),
        ({"learner": LEARNER | {"classification": "balanced_softmax"}}, "classification 'balanced_softmax'"),
        ({"learner": LEARNER | {"contrastive": {"weight": 0.1}}}, "contrastive"),
        ({"model": {"name": "small_cnn", "channels": [4, 4], "norm": "batch"}}, "BatchNorm"),
        ({**READS_DIGESTS, "digests": {"per_digest": 4}}, "digest would leave"),
    ],
)
def test_a_claim_that_settings_make_false_is_refused_here_too(
    tmp_path: Path, policy: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    refused(train, hospital(tmp_path, policy, privacy=SAMPLE, **changes), PrivacyError, reason)
    if "digests" in changes:
        refused(digest, hospital(tmp_path, policy, privacy=SAMPLE, **changes), PrivacyError, reason)
        return
    site = hospital(tmp_path, policy, privacy=SAMPLE, **changes | clusters(sparsity_epsilon=2.0))
    refused(sparsity, site, PrivacyError, reason)


@pytest.mark.parametrize("kind", ["client_local", "client_central", "sample"])
def test_segments_of_a_ring_turn_that_no_account_covers_are_refused(tmp_path: Path, kind: str) -> None:
    ring = {"name": "serial_ring", "segments": 1}
    site = hospital(tmp_path / "protected", {}, privacy=OF_MODE[kind], strategy=ring)
    cut = json.dumps({"turn": TURN | {"segments": 4}})
    refused(lambda site: train(site, settings=cut), site, PrivacyError, "use 1 segment")
    train(site, settings=json.dumps({"turn": TURN}))


@pytest.mark.parametrize("hidden", [HIDDEN_LABELS, {}], ids=["labels hidden", "labels in the clear"])
@pytest.mark.parametrize(
    "policy",
    [*map(demanding, ["client_local", "client_central", "sample"]), {"max_epsilon": 60.0}],
    ids=["client_local", "client_central", "sample", "budget"],
)
def test_a_site_with_a_demand_or_a_budget_lends_no_digests(
    tmp_path: Path, policy: dict[str, Any], hidden: dict[str, Any]
) -> None:
    """Rows are mixed by their number, and no site can know that a sample is replaced in its row."""
    data = EXPERIMENT["data"] | {"test_fraction": 0, "validation_fraction": 0}
    asked: dict[str, Any] = READS_DIGESTS | {"data": data, "digests": DIGESTS | hidden}
    refused(digest, hospital(tmp_path / "demands", policy, **asked), PolicyRefusal, "lends no digests")
    lends = hospital(tmp_path / "lends", {}, **asked)
    assert digest(lends).digests is not None
    assert all("replaced in its row" in entry.note for entry in entries(lends))
    assert Ledger(lends.identity.state_dir).cost(1e-5).epsilon == pytest.approx(3.0 if hidden else 2.0)


@pytest.mark.parametrize("kind", ["client_local", "client_central", "sample"])
def test_sparsity_vectors_have_the_protection_demanded(tmp_path: Path, kind: str) -> None:
    refused(
        sparsity, hospital(tmp_path / "clear", demanding(kind), **clusters()), PolicyRefusal, "hides nothing"
    )
    site = hospital(tmp_path, demanding(kind), **clusters(sparsity_epsilon=2.0))
    if kind == "sample":
        assert len(sparsity(site).vector["sparsity"]) == 2
    else:
        refused(sparsity, site, PolicyRefusal, "hides one sample")


@pytest.mark.parametrize("answer", [evaluate, own_model])
def test_counts_in_the_clear_do_not_leave_a_site_that_demands_a_protection(
    tmp_path: Path, answer: Callable[[Site], Any]
) -> None:
    site = hospital(tmp_path, demanding("sample"), evaluation={"federated": True})
    with pytest.raises(PolicyRefusal, match="counts of right answers"):
        answer(site)
    assert entries(site) == ()


def test_a_budget_speaks_of_the_unit_that_is_demanded(tmp_path: Path) -> None:
    """An earlier release that hid one sample alone leaves nothing to claim for the whole site."""
    before = hospital(tmp_path, {}, **READS_DIGESTS, digests=DIGESTS)
    digest(before)
    with pytest.raises(PrivacyError, match=r"lifetime epsilon to inf \(site"):
        train(hospital(tmp_path, demanding("client_local", 1e6), privacy=LOCAL))
    assert train(hospital(tmp_path, {"max_epsilon": 60.0}, privacy=LOCAL)).num_examples == 1


def test_an_update_without_noise_does_not_leave(tmp_path: Path) -> None:
    site = hospital(tmp_path, demanding("sample", 1e6), privacy=SAMPLE | {"noise_multiplier": 0.0})
    with pytest.raises(PrivacyError, match="lifetime epsilon to inf"):
        train(site)


def test_perennial_check_says_what_a_site_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, site = tmp_path / "experiment.yaml", tmp_path / "site.yaml"
    asks = {**READS_DIGESTS, "digests": DIGESTS, "evaluation": {"federated": True}}
    experiment.write_text(yaml.safe_dump(EXPERIMENT | asks))
    policy = {"answers": ["train", "digest"]}
    content = {"site": "site-0", "state_dir": "state", "device": "cpu", "policy": policy}
    site.write_text(yaml.safe_dump(content))
    # without counts of right answers it takes part all the same
    check_command(site, experiment)
    assert re.findall(r"would refuse .*here", capsys.readouterr().out) == [
        "would refuse to answer 'evaluate': policy.answers: 'evaluate' is not answered here"
    ]
    site.write_text(yaml.safe_dump(content | {"policy": {"answers": ALL} | demanding("sample")}))
    with pytest.raises(PolicyRefusal, match="site site-0 would take no part in experiment"):
        check_command(site, experiment)
    told = capsys.readouterr().out
    assert "would refuse to answer 'digest': policy.require_privacy, max_epsilon:" in told
    refusals = re.findall(r"would refuse to answer '(\w+)': .*'sample'; (.*)", told)
    assert refusals == [
        ("train", "the experiment has privacy.mode 'none'"),
        ("evaluate", "counts of right answers leave without noise"),
    ]
