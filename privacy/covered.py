"""What each charge covers of what leaves a site, and what shows of its data without a charge.

A path is `Message.field`. `python -m perennial.benchmarks.twins` gives two copies of a site, which differ in
one record, the same requests: whatever differs in their answers is covered here or listed here, or it fails.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from perennial.privacy.entries import Entry

_COUNTS = ("correct", "total", "withheld")
_BESIDE = ("num_examples", "train_loss", "steps", "method", "metrics")
COVERED: dict[str, tuple[str, ...]] = {
    "update": ("TrainReply.update", "TrainReply.within_clip_norm", "MaskedReply.words"),
    "metrics": tuple(f"TrainReply.{name}" for name in _BESIDE),
    "class_means": ("FinishTaskReply.class_sums", "MaskedReply.words"),
    "statistics": (
        *("StatisticsReply.statistics", "StatisticsReply.statement"),
        *("FinishTaskReply.statistics", "MaskedReply.words"),
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


@dataclass(frozen=True)
class Uncovered:
    """Something that depends on the data and that no charge covers.

    field: regular expression of its path. text: of the text in it. words: what it tells, for people.
    """

    field: str
    words: str
    text: str = ""

    def covers(self, path: str, text: str = "") -> bool:
        """Whether this is what a difference at a path is."""
        return bool(re.fullmatch(self.field, path) and re.search(self.text, text))


UNCOVERED = (
    Uncovered(
        r"Refusal(\..*)?",
        "whether the site has samples of a task at all, and whether all, or a class, are as many as "
        "policy.min_samples says: it refuses below",
        r"policy\.min_samples|no sample|per_digest",
    ),
    Uncovered(
        r"Refusal(\..*)?",
        "whether a round would take more steps than policy.max_steps, which follows the number of samples",
        r"policy\.max_steps",
    ),
    Uncovered(
        r"Refusal(\..*)?",
        "whether the site's files can be read: it answers with an error that says no more",
        r"details are in this site's own log",
    ),
    Uncovered(
        r"LedgerTip\..*",
        "where the site keeps the operator's receipts: the length of its ledger, and a hash of its last line",
    ),
    Uncovered(
        r"DigestReply\.digests (shape|regrouped)",
        "how many digests a site lends, and which samples they mix, which follow the number of samples of "
        "the task: noise on digests hides a sample that is replaced by another one of its task",
    ),
    Uncovered("time", "how long the site takes, and whether it answers in time"),
    Uncovered("log", "what the site's own log, ledger and pages say, which stay at the hospital"),
)
"""All that shows without a charge, with any protection; tests/privacy/test_twins.py holds it."""


def uncovered_in_words() -> list[str]:
    """The list for people."""
    return [item.words for item in UNCOVERED]
