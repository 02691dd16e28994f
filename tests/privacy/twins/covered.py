"""What each charge to a ledger covers of what leaves a site. A path is `Message.field`."""

from collections.abc import Iterable

from perennial.privacy.entries import Entry

_COUNTS = ("correct", "total", "withheld")
_BESIDE = ("num_examples", "train_loss", "steps", "metrics")
COVERED: dict[str, tuple[str, ...]] = {
    "update": ("TrainReply.update", "MaskedReply.words"),
    "metrics": tuple(f"TrainReply.{name}" for name in _BESIDE),
    "statistics": (
        *("StatisticsReply.statistics", "StatisticsReply.statement"),
        "MaskedReply.words",
    ),
    "class_counts": ("ClassCountsReply.counts",),
    "digest": ("DigestReply.digests",),
    "sparsity": ("SparsityReply.vector",),
    "evaluation": (
        *(f"EvaluateReply.{name}" for name in (*_COUNTS, "tables", "uncalibrated")),
        *(f"PersonalModelReply.{name}" for name in _COUNTS),
        "CompareHeadsReply.correct",
        "CompareHeadsReply.total",
        "MaskedReply.words",
    ),
}
"""Fields that a charge of a kind covers."""


def covered_by(entries: Iterable[Entry]) -> set[str]:
    """The fields that these charges cover; an update in the clear is charged with what stands beside it."""
    found: set[str] = set()
    for entry in entries:
        found.update(COVERED[entry.kind])
        if entry.kind == "update" and not entry.protected:
            found.update(COVERED["metrics"])
    return found
