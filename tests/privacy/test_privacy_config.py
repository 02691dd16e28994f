"""The privacy block accepts what can be kept and refuses the rest with a reason."""

from typing import Any

import pytest
from pydantic import ValidationError

from perennial.privacy.config import PrivacyConfig

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
        ({"mode": "none", "ghost": True}, "ghost is set"),
        (LOCAL | {"physical_batch": 8}, "belong to mode sample"),
        (CENTRAL | {"ghost": True}, "belong to mode sample"),
        (SAMPLE | {"physical_batch": 0}, "physical_batch"),
        (LOCAL | {"adaptive_clipping": {"count_noise_multiplier": 5.0}}, "needs mode client_central"),
        (CENTRAL | {"adaptive_clipping": {"count_noise_multiplier": 1.0}}, "below twice"),
        (
            CENTRAL | {"noise_multiplier": 0, "adaptive_clipping": {"count_noise_multiplier": 1.0}},
            "below twice",
        ),
        (
            CENTRAL
            | {
                "bayesian": {"pairs": 3, "planned_rounds": 1},
                "adaptive_clipping": {"count_noise_multiplier": 4.0},
            },
            "choose one",
        ),
        (SAMPLE | {"sample_rate": None}, "sample_rate is missing"),
        (SAMPLE | {"sample_rate": 0.0}, "sample_rate"),
        (LOCAL | {"sample_rate": 0.1}, "belong to mode sample"),
        (CENTRAL | {"noise_multiplier": 0, "bayesian": {"pairs": 3, "planned_rounds": 1}}, "needs noise"),
        (LOCAL | {"bayesian": {"pairs": 2, "planned_rounds": 1}}, "pairs"),
        (
            LOCAL | {"bayesian": {"pairs": 3, "planned_rounds": 1, "failure_probability": 1e-17}},
            "failure_probability",
        ),
        (LOCAL | {"noise_source": "numpy"}, "noise_source"),
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
