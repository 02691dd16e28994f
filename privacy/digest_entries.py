"""The ledger entries of a release of digests, for the site and for the server's record."""

from typing import Any

from perennial.privacy.calibration import gaussian_multiplier
from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import DigestGuarantee
from perennial.privacy.entries import Entry


def digest_entries(
    config: DigestConfig, guarantee: DigestGuarantee, run: str, experiment: str, recipient: str
) -> list[Entry]:
    """What a release of digests is charged as: the features, and the labels where they are protected."""
    common: dict[str, Any] = {
        "run": run,
        "experiment": experiment,
        "recipient": recipient,
        "kind": "digest",
        "unit": "sample",
        "relation": "replace",
    }
    if not config.protects:
        note = ""
        if guarantee.nominal is not None:
            note = f"nominal epsilon {guarantee.nominal:g}; with a public scale {guarantee.if_public:g}"
        return [Entry(**common, mechanism="unprotected", note=note)]
    common["seeded"] = config.noise_source == "seeded"
    note = "labels are public" if config.labels_in_the_clear else ""
    numbers: dict[str, Any] = {"mechanism": "stated", "epsilon": guarantee.epsilon, "delta": 0.0}
    if config.protection == "gauss":
        multiplier = gaussian_multiplier(guarantee.epsilon, guarantee.delta)
        numbers = {"mechanism": "gaussian", "noise_multiplier": multiplier, "sample_rate": 1.0, "steps": 1}
    entries = [Entry(**common, **numbers, note=note)]
    if config.label_epsilon is not None:
        labels = {"mechanism": "stated", "epsilon": config.label_epsilon, "delta": 0.0}
        entries.append(Entry(**common, **labels, note="labels of the digests, by randomised response"))
    return entries
