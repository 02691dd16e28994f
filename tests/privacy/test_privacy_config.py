"""The privacy block accepts what can be kept and refuses the rest with a reason."""

from typing import Any

import pytest
from pydantic import ValidationError

from perennial.privacy.config import AdaptiveClippingConfig, PrivacyConfig

LOCAL: dict[str, Any] = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 2.0}
CENTRAL = LOCAL | {"mode": "client_central"}
SAMPLE = LOCAL | {"mode": "sample", "sample_rate": 0.1}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "client_local", "clip_norm": 1.0}, "noise_multiplier is missing"),
        ({"mode": "sample", "noise_multiplier": 1.0}, "clip_norm is missing"),
        (LOCAL | {"clip_norm": 0.0}, "(?s)clip_norm.*greater than 0"),
        (LOCAL | {"clip_norm": float("inf")}, "(?s)clip_norm.*finite"),
        (LOCAL | {"clip_norm": float("nan")}, "(?s)clip_norm.*finite"),
        (LOCAL | {"noise_multiplier": -1.0}, "(?s)noise_multiplier.*greater than or equal to 0"),
        (LOCAL | {"noise_multiplier": float("nan")}, "(?s)noise_multiplier.*finite"),
        (LOCAL | {"delta": 0.0}, "(?s)delta.*greater than 0"),
        (LOCAL | {"delta": 1.0}, "(?s)delta.*less than 1"),
        ({"mode": "none", "noise_multiplier": 1.0}, "protect nothing"),
        (LOCAL | {"adaptive_clipping": {}}, "needs mode client_central"),
        (CENTRAL | {"noise_multiplier": 0, "adaptive_clipping": {}}, "must be above 0"),
        (CENTRAL | {"bayesian": True, "adaptive_clipping": {}}, "choose one"),
        (SAMPLE | {"sample_rate": None}, "sample_rate is missing"),
        (SAMPLE | {"sample_rate": 0.0}, "sample_rate"),
        (LOCAL | {"sample_rate": 0.1}, "belong to mode sample"),
        (CENTRAL | {"noise_multiplier": 0, "bayesian": True}, "needs noise"),
        (LOCAL | {"accountant": "moments"}, "accountant"),
        (LOCAL | {"clipnorm": 1.0}, "clipnorm"),
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


def test_nothing_is_protected_by_default() -> None:
    privacy = PrivacyConfig()
    assert not privacy.enabled
    assert privacy.hidden_unit is None


def test_headline_defaults() -> None:
    privacy = PrivacyConfig.model_validate(LOCAL)
    assert (privacy.delta, privacy.accountant) == (1e-5, "prv")


@pytest.mark.parametrize(("values", "unit"), [(LOCAL, "site"), (CENTRAL, "site"), (SAMPLE, "sample")])
def test_unit_of_each_mode(values: dict[str, Any], unit: str) -> None:
    assert PrivacyConfig.model_validate(values).hidden_unit == unit


def test_optional_blocks() -> None:
    privacy = PrivacyConfig.model_validate(CENTRAL | {"adaptive_clipping": {"quantile": 0.4}})
    assert privacy.adaptive_clipping == AdaptiveClippingConfig(quantile=0.4)
    assert PrivacyConfig.model_validate(privacy.model_dump(mode="json")) == privacy
    for given, found in ((True, True), (False, False), (None, False)):
        assert PrivacyConfig.model_validate(CENTRAL | {"bayesian": given}).bayesian is found
