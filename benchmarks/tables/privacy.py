"""What protection costs in accuracy, beside what it is worth in epsilon."""

import math
from typing import Any

from benchmarks.table import STANDARD, Row, Table


def epsilon(summary: dict[str, Any]) -> float:
    """Worst case over sites; infinite without protection, or without noise."""
    value = None if summary["epsilon"] is None else summary["epsilon"]["value"]
    return math.inf if value is None else float(value)


_MEASURES = {"epsilon": epsilon} | dict(STANDARD)
_NOTE_SITES = (
    "Epsilon at delta 0.001, PRV. client_central trusts the server. client_local does not; it counts half "
    "its noise multiplier (replacement of a site), and the mean has the noise of all sites."
)
_NONE = ("privacy.mode=none", "privacy.clip_norm=null", "privacy.noise_multiplier=null")
_PLAIN_SGD = (*_NONE, "privacy.sample_rate=null", "learner.optimizer.lr=0.1")

TABLES = {
    "privacy_sites": Table(
        "Digits, 40 sites, 2 tasks of 5 classes, 10 rounds each: hiding a whole site",
        [
            Row("no protection", "dp_central_digits", _NONE),
            Row("client_central, sigma 1", "dp_central_digits"),
            Row("client_central, sigma 2", "dp_central_digits", ("privacy.noise_multiplier=2.0",)),
            Row(
                "client_local, sigma 2",
                "dp_central_digits",
                ("privacy.mode=client_local", "privacy.noise_multiplier=2.0"),
            ),
        ],
        measures=_MEASURES,
        plain=frozenset({"epsilon"}),
        note=_NOTE_SITES,
    ),
    "privacy_samples": Table(
        "Digits, 5 sites, 2 tasks of 5 classes, 5 rounds each: hiding one training sample",
        [
            Row(
                "no protection",
                "dp_sample_digits",
                (*_NONE, "privacy.sample_rate=null", "learner.optimizer.lr=0.1"),
            ),
            Row("sample, sigma 1", "dp_sample_digits"),
            Row("sample, sigma 2", "dp_sample_digits", ("privacy.noise_multiplier=2.0",)),
        ],
        measures=_MEASURES,
        plain=frozenset({"epsilon"}),
        note="Epsilon at delta 0.0001, PRV; the server is not trusted. The row without protection trains on "
        "batches of 16 at learning rate 0.1.",
    ),
}
