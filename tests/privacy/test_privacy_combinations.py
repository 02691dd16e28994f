"""What would be a false claim is refused with its reason, and the claim that stays says what it is."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from perennial.client.policy import check_claim
from perennial.config.experiment import Experiment
from perennial.foundation.errors import PrivacyError
from perennial.learning.losses import LOSSES
from perennial.privacy.combinations import refuse_false_claims
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.entries import Entry
from perennial.privacy.statement import describe

LOCAL = PrivacyConfig(mode="client_local", clip_norm=1.0, noise_multiplier=8.0)
CENTRAL = PrivacyConfig(mode="client_central", clip_norm=1.0, noise_multiplier=4.0)
SAMPLE = PrivacyConfig(mode="sample", sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.0)


def settings(**changes: Any) -> dict[str, Any]:
    return {"norm": "group", "memory_selection": "random"} | changes


@pytest.mark.parametrize(
    ("privacy", "changes", "reason"),
    [
        (SAMPLE, {"memory_selection": "herding"}, "selection: random"),
        (SAMPLE, {"memory_selection": "nearest"}, "selection: random"),
        (SAMPLE, {"balanced_replay": True}, "opacus#813"),
        (SAMPLE, {"norm": "batch"}, "no gradient of one sample"),
        (SAMPLE, {"coupled_terms": ["learner.contrastive"]}, "learner.contrastive: a sample's loss depends"),
        (LOCAL, {"norm": "batch"}, "negative"),
        (CENTRAL, {"norm": "batch"}, "negative"),
        (LOCAL, {"weights_use_metrics": True}, "report in the clear"),
        (SAMPLE, {"weights_use_metrics": True}, "report in the clear"),
        (
            LOCAL,
            {"clear_uploads": ["control variate", "label histogram"]},
            "control variate, label histogram",
        ),
        (LOCAL, {"needs_every_class": True}, "sign: 1"),
        (LOCAL, {"digest": "none"}, "digest would leave without"),
        (SAMPLE, {"sparsity": "none"}, "sparsity vector would leave without"),
        (LOCAL, {"digest": "sample"}, "hides one sample"),
        (CENTRAL, {"sparsity": "sample"}, "hides one sample"),
    ],
)
def test_false_claims_are_refused(privacy: PrivacyConfig, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        refuse_false_claims(privacy, **settings(**changes))


@pytest.mark.parametrize("privacy", [LOCAL, CENTRAL])
def test_a_loss_that_refuses_a_site_without_a_class_goes_with_no_protection(privacy: PrivacyConfig) -> None:
    """Whether the site answers would tell, for one charge, whether it has a record of the class."""
    for sign in (1, -1):
        experiment = Experiment.model_validate(
            {
                "name": "prior",
                "data": {"source": "digits", "sites": 3, "partition": {"kind": "iid"}},
                "model": {"name": "mlp", "norm": "none"},
                "tasks": {"count": 2, "rounds": 1},
                "learner": {
                    "preset": "none",
                    "optimizer": {"lr": 0.1},
                    "classification": {"name": "balanced_softmax", "sign": sign},
                },
                "privacy": privacy.model_dump(),
                "evaluation": {"federated": False},
            }
        )
        if sign == 1:
            check_claim(experiment)
        else:
            with pytest.raises(PrivacyError, match="samples of every class"):
                check_claim(experiment)


@pytest.mark.parametrize(
    ("privacy", "changes"),
    [
        (SAMPLE, {}),
        (SAMPLE, {"memory_selection": None}),
        (SAMPLE, {"digest": "sample", "sparsity": "sample"}),
        (LOCAL, {"memory_selection": "herding", "balanced_replay": True}),
        (LOCAL, {"coupled_terms": ["learner.contrastive"]}),
        (LOCAL, {"digest": "site"}),
        (
            PrivacyConfig(),
            {"norm": "batch", "weights_use_metrics": True, "digest": "none", "memory_selection": "herding"},
        ),
    ],
)
def test_true_claims_pass(privacy: PrivacyConfig, changes: dict[str, Any]) -> None:
    refuse_false_claims(privacy, **settings(**changes))


def updates(privacy: PrivacyConfig, rounds: int) -> list[Entry]:
    """In mode sample of one step each, at a rate of 0.1."""
    entry = Entry.of_update(privacy, run="r", experiment="e", recipient="server", sample_rate=0.1)
    return [entry] * rounds


@pytest.mark.parametrize(
    ("privacy", "rounds", "expected"), [(LOCAL, 50, 8.606), (CENTRAL, 50, 8.606), (SAMPLE, 100, 7.057)]
)
def test_statement_figures(privacy: PrivacyConfig, rounds: int, expected: float) -> None:
    statement = describe(privacy, updates(privacy, rounds))
    assert statement.epsilon == pytest.approx(expected, rel=0.01)
    assert (statement.delta, statement.accountant) == (1e-5, "prv")


def test_statements_name_unit_adversary_and_relation() -> None:
    local, central, sample = (describe(p, updates(p, 1)) for p in (LOCAL, CENTRAL, SAMPLE))
    assert "one site" in local.unit
    assert "replaced" in local.relation
    assert "server" in local.adversary
    assert "server is trusted" in central.adversary
    assert any("without noise" in item for item in central.not_covered)
    assert "one training sample" in sample.unit
    assert "added or removed" in sample.relation


def test_nothing_is_claimed_without_protection() -> None:
    statement = describe(PrivacyConfig(), updates(PrivacyConfig(), 10))
    assert statement.epsilon == math.inf
    values = json.loads(json.dumps(statement.to_json(), allow_nan=False))
    assert (values["epsilon"], values["protected"]) == (None, False)


def test_warnings() -> None:
    seeded = PrivacyConfig(
        mode="sample",
        sample_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=0.0,
        delta=1e-3,
    )
    warnings = " ".join(describe(seeded, updates(seeded, 5), units=1000).warnings)
    for part in ("noise_multiplier is 0", "1 / 1000"):
        assert part in warnings
    assert describe(LOCAL, updates(LOCAL, 5), units=10).warnings == ()


def test_a_sample_that_digests_hide_from_replacement_is_claimed_so_at_their_cost_too() -> None:
    alone = describe(SAMPLE, updates(SAMPLE, 5))
    digest = Entry(
        run="r",
        experiment="e",
        recipient="server",
        kind="digest",
        unit="sample",
        relation="replace",
        mechanism="stated",
        epsilon=8.0,
        delta=0.0,
    )
    both = describe(SAMPLE, [*updates(SAMPLE, 5), digest])
    assert both.epsilon > alone.epsilon + 8.0
    assert (alone.relation, both.relation) == (
        "one training sample is added or removed",
        "one training sample is replaced by another in its row",
    )
    assert "beside updates, with noise of their own: digest" in both.mechanism


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_says_itself_whether_dp_sgd_can_have_it(name: str) -> None:
    learner = {"preset": "none", "classification": name, "optimizer": {"lr": 0.1}} | (
        {"memory": {"selection": "random", "share": 0.5}} if name == "icarl_bce" else {}
    )
    experiment = Experiment.model_validate(
        {
            "name": "losses",
            "data": {"source": "digits", "sites": 2},
            "tasks": {"count": 2, "rounds": 1},
            "model": {"name": "mlp", "norm": "none"},
            "learner": learner,
            "privacy": SAMPLE.model_dump(exclude_unset=True),
            "evaluation": {"federated": False},
        }
    )
    if LOSSES[name].alone:
        check_claim(experiment)
    else:
        with pytest.raises(PrivacyError, match=f"learner.classification '{name}': a sample's loss depends"):
            check_claim(experiment)


PRIVACY_CONFIG_LOCAL: dict[str, Any] = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 2.0}
PRIVACY_CONFIG_CENTRAL = PRIVACY_CONFIG_LOCAL | {"mode": "client_central"}
PRIVACY_CONFIG_SAMPLE = PRIVACY_CONFIG_LOCAL | {"mode": "sample", "sample_rate": 0.1}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "client_local", "clip_norm": 1.0}, "noise_multiplier is missing"),
        ({"mode": "sample", "noise_multiplier": 1.0}, "clip_norm is missing"),
        (PRIVACY_CONFIG_LOCAL | {"clip_norm": 0.0}, "(?s)clip_norm.*greater than 0"),
        (PRIVACY_CONFIG_LOCAL | {"clip_norm": float("inf")}, "(?s)clip_norm.*finite"),
        (PRIVACY_CONFIG_LOCAL | {"clip_norm": float("nan")}, "(?s)clip_norm.*finite"),
        (
            PRIVACY_CONFIG_LOCAL | {"noise_multiplier": -1.0},
            "(?s)noise_multiplier.*greater than or equal to 0",
        ),
        (PRIVACY_CONFIG_LOCAL | {"noise_multiplier": float("nan")}, "(?s)noise_multiplier.*finite"),
        (PRIVACY_CONFIG_LOCAL | {"delta": 0.0}, "(?s)delta.*greater than 0"),
        (PRIVACY_CONFIG_LOCAL | {"delta": 1.0}, "(?s)delta.*less than 1"),
        ({"mode": "none", "noise_multiplier": 1.0}, "protect nothing"),
        (PRIVACY_CONFIG_CENTRAL | {"bayesian": True}, "allowed client_local and sample"),
        (PRIVACY_CONFIG_SAMPLE | {"sample_rate": None}, "sample_rate is missing"),
        (PRIVACY_CONFIG_SAMPLE | {"sample_rate": 0.0}, "sample_rate"),
        (PRIVACY_CONFIG_LOCAL | {"sample_rate": 0.1}, "belong to mode sample"),
        (
            PRIVACY_CONFIG_CENTRAL | {"mode": "client_local", "noise_multiplier": 0, "bayesian": True},
            "needs noise",
        ),
        (PRIVACY_CONFIG_LOCAL | {"accountant": "moments"}, "accountant"),
        (PRIVACY_CONFIG_LOCAL | {"clipnorm": 1.0}, "clipnorm"),
        ({"mode": "local"}, "mode"),
        (
            {"mode": "sample", "release": "sums", "noise_multiplier": 1.0, "unit": "patient"},
            "unit: found 'patient' with release sums",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PrivacyConfig.model_validate(values)
