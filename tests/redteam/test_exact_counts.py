"""Under a protection no exact count leaves: right answers of compared heads, and weighted sums."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.policy import check_compared_heads, check_statistics
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PrivacyError
from perennial.protocol.messages import ClassCountsRequest, CompareHeadsRequest, StatisticsRequest
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import BASE, Hospital
from tests.redteam.attacked_hospital import SUMS as OF_SUMS

SUMS = OF_SUMS | {"data": BASE["data"] | {"validation_fraction": 0.3}}
POLICY = {"answers": ["statistics", "evaluate"], "require_privacy": "sample", "max_epsilon": 8.0}


def heads(hospital: Hospital, count: int = 2) -> Tensors:
    classes, width = hospital.stamp()["num_classes"], hospital.site.models.load_fixed_features().width
    return Tensors(weight=torch.zeros(count, classes, width), bias=torch.zeros(count, classes))


def planned(strategy: dict[str, Any], **changes: Any) -> Experiment:
    """An experiment that no document can say: the keys of its strategy were changed after validation."""
    content = {"name": "x"} | {key: value for key, value in (SUMS | changes).items() if value is not None}
    experiment = Experiment.model_validate(content)
    section = type(experiment.strategy).model_validate({"name": "analytic", **strategy})
    return experiment.model_copy(update={"strategy": section})


def test_a_site_tells_no_exact_right_answers_of_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, POLICY, **SUMS)
    # as for an experiment that compares heads, which the document could not say
    monkeypatch.setattr("perennial.client.plan.Plan.most", lambda *_: 9)
    monkeypatch.setattr("perennial.strategies.analytic.site.SumsSite.check", lambda *_: None)
    features = hospital.site.models.load_fixed_features().content
    request = CompareHeadsRequest(**hospital.stamp(), features=features, heads=heads(hospital))
    assert hospital.ask(request) is None
    assert "privacy: privacy.mode sample: compare_heads" in hospital.refusal
    assert not hospital.site.identity.ledger.started


@pytest.mark.parametrize("mode", ["sample", "sample_shared"])
def test_neither_mask_nor_the_noise_of_evaluations_covers_compared_heads(mode: str) -> None:
    shared: dict[str, Any] = {
        "privacy": SUMS["privacy"] | {"mode": mode},
        "secure": {"least": 3, "quorum": 3, "assumed_colluders": 0},
    }
    if mode == "sample_shared":
        shared["privacy"] |= {"accountant": "rdp"}
    experiment = Experiment.model_validate(
        {"name": "x"} | {key: value for key, value in (SUMS | shared).items() if value is not None}
    )
    with pytest.raises(PrivacyError, match=f"privacy.mode {mode}: compare_heads"):
        check_compared_heads(SitePolicy(), experiment)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"head": "balanced_ridge", "shrinkage": 0.1}, "balanced_ridge"),
        ({"head": "ridge", "shrinkage": "validation"}, "validation"),
        ({"head": "auto"}, "'auto'"),
    ],
)
def test_the_site_itself_refuses_a_head_that_needs_exact_counts(keys: dict[str, Any], found: str) -> None:
    with pytest.raises(PrivacyError, match=f"privacy.mode sample: strategy.*{found}"):
        check_statistics(SitePolicy(), planned(keys))
    with pytest.raises(ValueError, match=found):
        Experiment.model_validate(
            {"name": "x"}
            | {k: v for k, v in SUMS.items() if v is not None}
            | {"strategy": {"name": "analytic", **keys}}
        )


def test_weights_that_the_server_chooses_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, POLICY, **SUMS)
    monkeypatch.setattr("perennial.strategies.analytic.site.SumsSite.check", lambda *_: None)
    features, classes = hospital.site.models.load_fixed_features().content, hospital.stamp()["num_classes"]
    weights = [1 << 20] * classes
    assert (
        hospital.ask(StatisticsRequest(**hospital.stamp(), of_task=1, features=features, weights=weights))
        is None
    )
    assert "StatisticsRequest: weights: found some" in hospital.refusal
    hospital.refusal = ""
    monkeypatch.setattr("perennial.client.plan.Plan.most", lambda *_: 9)
    assert hospital.ask(ClassCountsRequest(**hospital.stamp(), of_task=1)) is None
    assert "class counts leave without noise" in hospital.refusal
    assert not hospital.site.identity.ledger.started
