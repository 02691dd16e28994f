"""What a hostile server could get out of a site under a policy: one sentence, then channel by channel.

For each channel: whether the server can recover single images, computed from the policy alone. The server is
taken at its worst: it sends any model, in the requests of any experiment that the hospital approves.
tests/redteam runs an attack on each channel and holds these answers against what it recovers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from perennial.client.floor import exempt
from perennial.config.site import Answer, Release, SitePolicy

ANY_APP = (
    "a hostile server can recover single images: YES, ALL OF THEM: connection.any_app runs whatever code and "
    "settings the operator sends, which can read what the SuperNode's user can and ignore this file"
)
OTHER_CODE = (
    "a hostile server can recover single images: YES, ALL OF THEM, by apps with code of their own that "
    "other_code names: such code can read what the SuperNode's user can and ignore this file"
)
SHARED = ("client_shared", "sample_shared")
"""Demands that noise of all sites together serves."""
BITS = 3 * 8
"""Bits of the smallest thing that is called an image here: three pixels of 8 bits."""


@dataclass(frozen=True)
class Channel:
    """One way out. recovers: whether single images come out of it. why: the rule that decides it.

    open: whether anything leaves by it at all.
    """

    name: str
    recovers: bool
    why: str
    open: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {'YES' if self.recovers else 'no'}, {self.why}"


def channels(policy: SitePolicy) -> Iterator[Channel]:
    """Every channel of the protocol, whether it is open or shut."""
    yield _updates(policy)
    yield _evaluation(policy)
    yield _class_means(policy)
    yield _digests(policy)
    yield _sparsity(policy)
    yield _prototypes(policy)
    yield _statistics(policy)


def in_one_sentence(policy: SitePolicy) -> str:
    """What the server can learn under a policy at worst, from the same channels."""
    found = [channel for channel in channels(policy) if channel.open]
    learns = "under this policy the server can learn"
    if by := [channel.name for channel in found if channel.recovers]:
        return f"{learns} single images of patients, by {', '.join(by)}"
    if not found:
        return f"{learns} nothing that is computed from samples: no request for it is answered"
    if policy.require_privacy != "none" and policy.max_epsilon is not None:
        return (
            f"{learns} of one {policy.unit} what epsilon {policy.max_epsilon:g} at delta {policy.delta:g} "
            f"allows over all runs together, by {', '.join(channel.name for channel in found)}"
        )
    return (
        f"{learns} sums, means and counts over {policy.min_samples} samples and more, with no bound on what "
        f"all of them together tell of one sample, by {', '.join(channel.name for channel in found)}"
    )


def in_words(policy: SitePolicy, *, any_app: bool = False, other_code: bool = False) -> Iterator[str]:
    """The lines that `perennial site check` prints.

    any_app: connection.any_app of the same file. other_code: whether the file names apps with code.
    """
    found = [*channels(policy)]
    if any_app or other_code:
        yield ANY_APP if any_app else OTHER_CODE
        yield "what Perennial's own code would let out, if the operator sends that:"
    yield in_one_sentence(policy)
    by = [channel.name for channel in found if channel.recovers]
    if by:
        yield f"a hostile server can recover single images: YES, by {', '.join(by)}"
    else:
        yield "a hostile server can recover single images: no channel that this file opens gives them"
    yield from (f"  {channel}" for channel in found)
    if policy.require_privacy in ("client_local", "sample") and policy.max_epsilon is not None:
        yield (
            f"  what all releases together tell of one {policy.unit} is bounded by epsilon "
            f"{policy.max_epsilon:g} at delta {policy.delta:g}; an epsilon above 10 bounds little"
        )


def _shut(policy: SitePolicy, name: str, answer: Answer) -> Channel | None:
    if answer in policy.answers:
        return None
    return Channel(name, False, f"policy.answers does not list {answer!r}", open=False)


def _budget(policy: SitePolicy) -> str | None:
    """Why nothing leaves in the clear; None where it may."""
    if policy.require_privacy != "none":
        return f"policy.require_privacy demands {policy.require_privacy!r}"
    if policy.max_epsilon is not None:
        return "policy.max_epsilon: what leaves in the clear has an infinite epsilon"
    return None


def _masked(policy: SitePolicy, name: str) -> Channel | None:
    """A channel in which values leave as a part of masked sums only; None where they may leave alone."""
    if policy.require_privacy not in SHARED:
        if not policy.require_secure or policy.require_privacy != "none":
            return None
        return Channel(
            name,
            True,
            "policy.require_secure without noise: masks hide this site's value from a server that keeps to "
            "the protocol; one that lies chooses the model and who counts as present, and one sum under a "
            "model made for it gives single images. Noise of all sites stops that: require_privacy "
            "client_shared or sample_shared",
        )
    if not policy.peers:
        why = "policy.peers pins nobody, so a hostile server can make up the sites whose noise hides this one"
        return Channel(name, True, why)
    return Channel(
        name,
        False,
        f"policy.require_privacy {policy.require_privacy!r}: a sum of {name} with those of pinned peers and "
        "the noise of all, as long as no more of them than the experiment assumes work with the server",
    )


def _closed(policy: SitePolicy, name: str, answer: Answer) -> Channel | None:
    """The channel if the site does not answer, or sends nothing in the clear; None where it is open."""
    if shut := _shut(policy, name, answer):
        return shut
    budget = _budget(policy)
    return None if budget is None else Channel(name, False, budget, open=policy.require_privacy != "none")


def _updates(policy: SitePolicy) -> Channel:
    name = "updates"
    if shut := _shut(policy, name, "train"):
        return shut
    if policy.require_privacy == "client_central":
        return Channel(
            name, True, "mode client_central cuts an update and sends it without noise to the server"
        )
    if masked := _masked(policy, name):
        return masked
    if policy.require_privacy != "none":
        return Channel(name, False, f"{_budget(policy)}, with noise from this site")
    if policy.max_epsilon is not None:
        # the server may name the mode, and client_central has a finite epsilon against everybody but it
        return Channel(
            name,
            True,
            "policy.require_privacy 'none' with a budget takes mode client_central, in which the server sees "
            "the update without noise",
        )
    return Channel(
        name,
        True,
        "policy.require_privacy 'none': a model made for it leaves single images in the update of "
        f"{policy.min_samples} samples and more",
    )


def _evaluation(policy: SitePolicy) -> Channel:
    name = "counts of right answers"
    if shut := _shut(policy, name, "evaluate"):
        return shut
    # in client_central, which a budget alone lets the server name, it sees the counts and promises the noise
    at_server = policy.require_privacy in ("none", "client_central")
    if not at_server:
        return Channel(name, False, f"{_budget(policy)}, so counts leave with noise, which costs budget")
    # a floor takes one model more: a count with a sample less the count without it is one bit of the sample
    most = policy.max_evaluations
    return Channel(
        name,
        most is None or most >= BITS,
        "exact counts: a model made for it moves one count by what one sample is, in each of "
        + ("as many questions as the experiments need" if most is None else f"{most} questions")
        + " (policy.max_evaluations)",
    )


def _few(policy: SitePolicy, name: str, release: Release, answer: Answer, usual: str) -> Channel:
    """A channel in the clear that the floor alone bounds."""
    if closed := _closed(policy, name, answer):
        return closed
    if exempt(policy, release):
        return Channel(name, True, f"policy.below_floor lists {release!r}, so single samples may leave")
    if policy.min_samples == 1:
        return Channel(name, True, "policy.min_samples 1 lets what comes from one sample leave")
    return Channel(name, False, usual)


def _class_means(policy: SitePolicy) -> Channel:
    usual = f"policy.min_samples: each sum is over {policy.min_samples} exemplars of a class and more"
    return _few(policy, "sums for class means", "class_means", "train", usual)


def _digests(policy: SitePolicy) -> Channel:
    usual = f"policy.min_samples: each digest mixes {policy.min_samples} samples and more"
    return _few(policy, "digests", "digest", "digest", usual)


def _sparsity(policy: SitePolicy) -> Channel:
    usual = f"policy.min_samples: each number is a mean over {policy.min_samples} samples and more"
    return _few(policy, "sparsity vectors", "sparsity", "sparsity", usual)


def _prototypes(policy: SitePolicy) -> Channel:
    name = "gradients of prototypes"
    if closed := _closed(policy, name, "train"):
        return closed
    if exempt(policy, "prototypes"):
        return Channel(name, True, "policy.below_floor lists 'prototypes', each of which is one sample")
    return Channel(name, False, "policy.below_floor does not list 'prototypes'", open=False)


def _statistics(policy: SitePolicy) -> Channel:
    name = "sums of features"
    if shut := _shut(policy, name, "statistics"):
        return shut
    if masked := _masked(policy, name):
        return masked
    if budget := _budget(policy):
        return Channel(name, False, budget)
    return Channel(
        name,
        True,
        "policy.require_privacy 'none': sums over fewer samples than features tell the space that these lie "
        "in, and features can be turned back into images",
    )
