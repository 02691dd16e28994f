"""What protection costs in accuracy, beside what it is worth in epsilon."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.table import STANDARD, Row, Table


def epsilon(summary: dict[str, Any]) -> float:
    """Worst case over sites; infinite without protection, or without noise."""
    value = None if summary["epsilon"] is None else summary["epsilon"]["value"]
    return math.inf if value is None else float(value)


_TWENTY = (*range(1, 11), *range(21, 31))
"""Final accuracies of one row differ by 2 to 3 points, so that five seeds tell no difference of one point."""
_MEASURES = {"epsilon": epsilon} | dict(STANDARD)
_NOTE_SITES = (
    "Epsilon at delta 0.001, PRV. client_central trusts the server. client_local does not; it counts half "
    "its noise multiplier (replacement of a site), and the mean has the noise of all sites."
)
_NOTE_SHARED = (
    "Epsilon at delta 0.001, RDP. client_central trusts the server. client_shared trusts neither the server "
    "nor another site: sums are masked, and each site adds a share of the noise. With m = 0.75 n the shares "
    "are sized for a quarter of the sites to be missing, so that with all sites there the sum carries 4/3 of "
    "the variance: its accuracy belongs beside the row with sigma 2 sqrt(n/m), and its epsilon is that of "
    "sigma 2."
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


def _shared(central: str, shared: str, sites: int) -> list[Row]:
    """Noise of a trusted server beside noise that the sites share.

    m is the number of honest sites in the sum that the claim assumes.
    """
    central_noise = ("privacy.accountant=rdp", "privacy.noise_multiplier=2.0")
    quorum = sites * 3 // 4
    widened = ("privacy.accountant=rdp", f"privacy.noise_multiplier={2 * math.sqrt(sites / quorum):.6f}")
    return [
        Row("client_central, sigma 2", central, central_noise),
        Row("client_shared, sigma 2, m = n", shared),
        Row("client_central, sigma 2 sqrt(n/m)", central, widened),
        Row("client_shared, sigma 2, m = 0.75 n", shared, (f"secure.quorum={quorum}",)),
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


def _within_a_point() -> list[Claim]:
    """That sharing the noise costs nothing, to one point: the rows differ by the draw of the noise alone."""
    pairs = {
        "client_shared, sigma 2, m = n": "client_central, sigma 2",
        "client_shared, sigma 2, m = 0.75 n": "client_central, sigma 2 sqrt(n/m)",
    }
    return [
        Claim(f"{shared}: within one point of {central}", shared, central, "final accuracy", margin=-1.0)
        for shared, central in pairs.items()
    ]


def _table(
    title: str,
    rows: list[Row],
    note: str,
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    pending: str = "",
    claims: Sequence[Claim] = (),
) -> Table:
    return Table(
        title,
        rows,
        seeds,
        measures=_MEASURES,
        plain=frozenset({"epsilon"}),
        note=note,
        pending=pending,
        claims=claims,
    )


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
    "shared_noise": _table(
        "Digits, 40 sites, 2 tasks of 5 classes, 10 rounds each: noise that sites share",
        _shared("dp_central_digits", "shared_noise_digits", 40),
        _NOTE_SHARED,
        _TWENTY,
        claims=_within_a_point(),
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
