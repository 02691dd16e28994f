"""The `digest` block of summary.json: whose digests the server holds, and what their noise is worth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import DigestGuarantee, guarantee_of, guess_log10
from perennial.strategies.digest_synthesis.store import DigestStore

FLOAT_LEVELS = 2**32


def digest_block(
    config: DigestConfig,
    length: int,
    store: DigestStore,
    rounds_stood_in: Mapping[str, int],
    withdrawn: Sequence[str],
) -> dict[str, Any]:
    """The `digest` block: figures by name, and a row for each site. length: numbers in one digest.

    A class is without digests if each site that lends has fewer samples of it than one digest takes.
    """
    guarantee = published_guarantee(config, length)
    sites = {
        site: {
            "digests": sum(len(digests.features) for digests in store.tasks(site).values()),
            "samples": store.samples(site),
            "bytes": store.bytes(site),
            "tasks": list(store.tasks(site)),
            "rounds_stood_in": rounds_stood_in.get(site, 0),
        }
        for site in store.sites
    }
    block: dict[str, Any] = {
        "samples_per_digest": config.per_digest,
        "numbers_per_digest": length,
        "mixing": config.mix,
        "protection": config.protection,
    }
    if guarantee.nominal is not None:
        block["nominal_epsilon"] = guarantee.nominal
    block["epsilon_of_one_sample"] = _figure(guarantee.epsilon)
    if guarantee.if_public is not None:
        block["epsilon_of_one_sample_were_the_scale_public"] = _figure(guarantee.if_public)
    block |= {
        "delta": guarantee.delta,
        "epsilon_of_one_label": _figure(guarantee.label_epsilon),
        "guess_heuristic_log10": round(guess_log10(length, FLOAT_LEVELS, config.per_digest), 1),
    }
    if missing := store.classes_without():
        block["classes_without_digests"] = missing
    if withdrawn:
        block["withdrawn"] = list(withdrawn)
    return block | {"sites": sites}


def published_guarantee(config: DigestConfig, length: int) -> DigestGuarantee:
    """The privacy guarantee of digests of `length` numbers, from the experiment's settings alone."""
    largest = max(config.weights) if config.weights else 1 / config.per_digest
    # the published scale is a share of the bound, so the bound itself does not matter to its epsilon
    return guarantee_of(config, length, config.largest or 1.0, largest)


def _figure(epsilon: float) -> float | str:
    return round(epsilon, 4) if math.isfinite(epsilon) else "infinite"
