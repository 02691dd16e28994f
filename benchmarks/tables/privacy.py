"""What protection costs in accuracy, beside what it is worth in epsilon."""

import math
from typing import Any

from perennial.benchmarks.table import STANDARD, Row, Table


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


def _sites(experiment: str) -> list[Row]:
    local = ("privacy.mode=client_local", "privacy.noise_multiplier=2.0")
    return [
        Row("no protection", experiment, _NONE),
        Row("client_central, sigma 1", experiment),
        Row("client_central, sigma 2", experiment, ("privacy.noise_multiplier=2.0",)),
        Row("client_local, sigma 2", experiment, local),
    ]


def _samples(experiment: str, *batches: str) -> list[Row]:
    """The rows of one data set, without protection and in mode sample.

    batches: changes of the row without protection beside its learning rate.
    """
    return [
        Row("no protection", experiment, (*_PLAIN_SGD, *batches)),
        Row("sample, sigma 1", experiment),
        Row("sample, sigma 2", experiment, ("privacy.noise_multiplier=2.0",)),
    ]


def _table(title: str, rows: list[Row], note: str) -> Table:
    return Table(title, rows, measures=_MEASURES, plain=frozenset({"epsilon"}), note=note)


TABLES = {
    "privacy_sites": _table(
        "Digits, 40 sites, 2 tasks of 5 classes, 10 rounds each: hiding a whole site",
        _sites("dp_central_digits"),
        _NOTE_SITES,
    ),
    "privacy_sites_fashion_mnist": _table(
        "Fashion-MNIST (6000 images of 14 x 14), 60 sites, 2 tasks of 5 classes, 10 rounds each: hiding a "
        "whole site",
        _sites("dp_central_fashion_mnist"),
        _NOTE_SITES,
    ),
    "privacy_samples": _table(
        "Digits, 5 sites, 2 tasks of 5 classes, 5 rounds each: hiding one training sample",
        _samples("dp_sample_digits"),
        "Epsilon at delta 0.0001, PRV; the server is not trusted. The row without protection trains on "
        "batches of 16 at learning rate 0.1.",
    ),
    "privacy_samples_fashion_mnist": _table(
        "Fashion-MNIST (6000 images of 14 x 14), 5 sites, 2 tasks of 5 classes, 5 rounds each: hiding one "
        "training sample",
        _samples("dp_sample_fashion_mnist", "learner.batch_size=16"),
        "Epsilon at delta 0.00001, PRV; the server is not trusted. The row without protection trains on "
        "batches of 16 at learning rate 0.1.",
    ),
}
