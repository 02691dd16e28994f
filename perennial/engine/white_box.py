"""Turns what an audit has watched into a recording that white-box tests can judge.

What is claimed is read from the experiment and the ledgers alone; what was done, from the watched releases.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perennial.config.experiment import Experiment
from perennial.privacy.attacks.white_box import Recording
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.privacy.witness import Seen

KINDS = {"client_local": "update", "client_central": "sum", "client_shared": "share", "sample": "step"}
MOST_VALUES = 4096
"""Of one release that are kept: more make no test sharper that must catch a tenth."""


def ledger_entries(folder: Path) -> list[Entry]:
    """Read the ledger entries of every simulated site of a run. folder: the run's."""
    found = sorted((folder / "sites").glob("*/ledger.jsonl"))
    return [entry for path in found for entry in Ledger(path.parent).entries()]


def recording_of(
    experiment: Experiment, seen: Sequence[Seen], entries: Sequence[Entry], sites: int
) -> Recording:
    """Put together the watched releases of a run and what its experiment and ledgers claim of them.

    seen: the releases. entries: of the ledgers. sites: how many took part.
    """
    privacy = experiment.privacy
    assert privacy.noise_multiplier is not None
    kind = "statistics" if privacy.release == "sums" else KINDS[privacy.mode]
    released = [one for one in seen if one.kind == kind and one.noise is not None]
    secure = experiment.secure
    honest = secure.honest if privacy.shared and secure is not None else 1
    sums: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(released):
        if privacy.shared:
            sums[f"{one.place} {one.part.rpartition('/')[2]}"].append(place)
    return Recording(
        noise=[np.asarray(one.noise)[:MOST_VALUES] for one in released],
        std=_claimed_std(experiment, sites, honest),
        shares=list(sums.values()),
        honest=honest,
        largest=tuple(length for one in seen for length in one.largest if one.kind in (kind, "clip")),
        clip_norm=privacy.clip_norm if privacy.adaptive_clipping is None else None,
        drawn=[(one.batch, one.units) for one in seen if one.kind == "batch"],
        sample_rate=privacy.sample_rate,
        made={kind: len(released)},
        charged=_charged(kind, entries, released, privacy.mode),
        parts=[(one.part.split("/")[0], one.part, frozenset(one.members)) for one in released if one.part],
    )


def _claimed_std(experiment: Experiment, sites: int, honest: int) -> float:
    """Standard deviation of each value of one release, in the units in which it was watched."""
    privacy = experiment.privacy
    if privacy.release == "sums":
        return 1.0  # watched in standard deviations of the claimed noise
    assert privacy.noise_multiplier is not None and privacy.clip_norm is not None
    std = privacy.noise_multiplier * privacy.clip_norm
    if privacy.mode == "client_central":
        return std / sites
    return std / math.sqrt(honest)


def _charged(kind: str, entries: Sequence[Entry], released: Sequence[Seen], mode: str) -> dict[str, int]:
    """How many such releases the sites' ledgers have. Noise at the server is in no site's hands."""
    found = Counter(entry.kind for entry in entries)
    if kind == "step":
        return {kind: sum(entry.steps or 0 for entry in entries if entry.kind == "update")}
    if mode == "client_central":
        return {kind: len(released)}
    return {kind: found["statistics" if kind == "statistics" else "update"]}
