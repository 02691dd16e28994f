"""What a server that lies could get out of a site under a policy: one sentence, then channel by channel.

The policy alone decides which protection each channel has; what comes out under it stands in the table of
privacy/exposure_table.py. The server is taken at its worst: it sends any model, in the requests of any
experiment that the hospital approves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from perennial.client.floor import exempt
from perennial.config.site import Answer, SitePolicy
from perennial.privacy.exposure_table import (
    COUNTS,
    DIGESTS,
    HONEST,
    MEANS,
    SPARSITY,
    SUMS,
    TABLE,
    UPDATES,
    Cell,
    Protection,
)

STRONG = (10.0, 1e-3)
"""The largest epsilon and delta of a budget whose noise attacks were tried against."""
BITS = 3 * 8
"""Bits of the smallest thing that is called an image here: three pixels of 8 bits."""


ANSWER: dict[str, Answer] = {
    UPDATES: "train",
    COUNTS: "evaluate",
    MEANS: "train",
    DIGESTS: "digest",
    SPARSITY: "sparsity",
    SUMS: "statistics",
}
"""What policy.answers must list for a channel to be open."""


@dataclass(frozen=True)
class Channel:
    """One kind of release under one policy. cell: of the exposure table. rule: what shuts it, or ''."""

    cell: Cell
    rule: str = ""
    """Which rule shuts it."""

    @property
    def name(self) -> str:
        return self.cell.channel

    @property
    def recovers(self) -> bool:
        """Whether a server that lies gets single images from it."""
        return self.cell.images[0]

    @property
    def open(self) -> bool:
        """Whether anything leaves by it at all."""
        return self.cell.protection != "shut"

    def __str__(self) -> str:
        return f"{self.name}: {self.cell.verdict()}; {self.rule or self.cell.why}"


def channels(policy: SitePolicy) -> Iterator[Channel]:
    """Yield one Channel for each kind of release of the protocol, open or shut under this policy."""
    for name, protection in protections(policy).items():
        rule = ""
        if protection == "shut":
            rule = f"policy.answers does not list {ANSWER[name]!r}"
            if ANSWER[name] in policy.answers:
                rule = "policy.require_privacy, max_epsilon, require_secure and below_floor let none leave"
        yield Channel(TABLE[name, protection], rule)


def protections(policy: SitePolicy) -> dict[str, Protection]:
    """The protection of each channel under the policy, by the channel's name."""
    answers, demand, budget = policy.answers, policy.require_privacy, policy.max_epsilon is not None
    clear: Protection = "masks" if policy.require_secure else "clear"
    shared: Protection = "shared" if policy.peers else "unpinned"
    of_all, bare = demand in ("client_shared", "sample_shared"), demand == "none"
    # a budget without a demand lets the server name a mode of its own, client_central as well
    updates: Protection = "noise"
    if of_all:
        updates = shared
    elif demand == "client_central" or (bare and budget and not policy.require_secure):
        updates = "central"
    elif bare:
        updates = clear
    noised: Protection = "noise" if demand in ("sample", "sample_shared") or (bare and budget) else "shut"
    beside: Protection = "clear" if bare and not budget else noised
    if policy.require_secure:
        beside = "shut"
    digests = beside
    if beside == "clear" and policy.min_samples > 1 and not exempt(policy, "digest"):
        digests = "floor"
    sums: Protection = (
        clear if bare and not budget else "noise" if bare or demand in ("sample", "patient") else "shut"
    )
    if of_all:
        sums = shared
    counts: Protection = "unpinned" if of_all and not policy.peers else "noise"
    if bare or demand == "client_central":
        # tables of measures tell more of one model than a count does
        few = (
            policy.max_evaluations is not None and policy.max_evaluations < BITS and "measures" not in answers
        )
        counts = "few" if few else "clear"
    found: dict[str, Protection] = {
        UPDATES: updates,
        COUNTS: counts,
        MEANS: clear if bare and not budget else "noise" if demand == "client_local" else "shut",
        DIGESTS: digests,
        SPARSITY: beside,
        SUMS: sums,
    }
    largest, delta = STRONG
    weak = policy.max_epsilon is not None and (policy.max_epsilon > largest or policy.delta > delta)
    for name, protection in found.items():
        if ANSWER[name] not in answers:
            found[name] = "shut"
        elif weak and protection in ("noise", "shared"):
            found[name] = "weak"
    return found


def in_one_sentence(policy: SitePolicy) -> str:
    """The most that a lying server can learn under this policy, and by which channels, in a sentence."""
    found = [channel for channel in channels(policy) if channel.open]
    learns = "under this policy the server can learn"
    if by := [channel.name for channel in found if channel.recovers]:
        return f"{learns} single images of patients, by {', '.join(by)}"
    if not found:
        return f"{learns} nothing that is computed from samples: no request for it is answered"
    names = ", ".join(channel.name for channel in found)
    if policy.require_privacy != "none" and policy.max_epsilon is not None:
        return (
            f"{learns} of one {policy.unit} what epsilon {policy.max_epsilon:g} at delta {policy.delta:g} "
            f"allows over all runs together, by {names}"
        )
    return (
        f"{learns} sums, means and counts over {policy.min_samples} samples and more, with no bound on what "
        f"all of them together tell of one sample, by {names}"
    )


def in_words(policy: SitePolicy) -> Iterator[str]:
    """The lines that `perennial site check` prints."""
    found = [*channels(policy)]
    yield in_one_sentence(policy)
    by = [channel.name for channel in found if channel.recovers]
    if by:
        yield f"a hostile server can recover single images: YES, by {', '.join(by)}"
    else:
        yield "a hostile server can recover single images: no channel that this file opens gives them"
    yield "  (in brackets: the attack that shows it, or that tried)"
    yield from (f"  {channel}" for channel in found)
    kept = [c.name for c in found if c.recovers and not c.cell.images[1]]
    if kept:
        yield f"  by {', '.join(kept)} {HONEST} gets none: the masks hide this site's value from it"
    if policy.require_privacy in ("client_local", "sample") and policy.max_epsilon is not None:
        yield (
            f"  what all releases together tell of one {policy.unit} is bounded by epsilon "
            f"{policy.max_epsilon:g} at delta {policy.delta:g}; an epsilon above 10 bounds little"
        )
