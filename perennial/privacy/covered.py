"""What shows of a site's data without a charge to its ledger.

A path is `Message.field`. `tests/twins` gives two copies of a site, which differ in
one record, the same requests: what differs in their answers is covered by a charge or listed here, or it
fails.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Uncovered:
    """A field of a message that depends on the data, and for which the ledger is not charged.

    field: regular expression of its path. text: regular expression found in its text. words: what it tells,
    for people.
    """

    field: str
    words: str
    text: str = ""

    def covers(self, path: str, text: str = "") -> bool:
        """Whether this explains a difference at this path with this text."""
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
        "whether the site's files can be read: it answers with an error that says no more",
        r"details are in this site's own log",
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
    """One sentence for each uncovered field, for people."""
    return [item.words for item in UNCOVERED]
