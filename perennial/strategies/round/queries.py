"""Asks sites for something other than training, and checks every reply before it is used."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from perennial.foundation.errors import ERROR, NO_ANSWER, NOT_APPROVED, REASON, ProtocolError, shown
from perennial.privacy.noised_counts import CountNoise
from perennial.protocol.fields import WireMessage, read_kind
from perennial.protocol.messages import EvaluateReply, Refusal
from perennial.protocol.stamp import Stamp, require_same_round
from perennial.strategies.round.exchange import Exchange

Reply = TypeVar("Reply", bound=WireMessage)


def describe_error(reason: str) -> str:
    """In words for the operator, why Flower says that no ClientApp answered a message.

    A site runs approved apps only: the folder that apps are unpacked to is read-only (deploy/approval.py).
    An error in writing there becomes NOT_APPROVED; any other reason is returned with ERROR before it.
    """
    if "/apps/" in reason and ("PermissionError" in reason or "Read-only file system" in reason):
        return NOT_APPROVED
    if reason == NOT_APPROVED:
        return reason
    return f"{ERROR}: {reason}"


def ask(
    grid: Grid,
    exchange: Exchange,
    requests: Sequence[tuple[str, int, WireMessage]],
    expected: type[Reply],
    deadline: float,
    dropped: Callable[[str, str], None],
    check: Callable[[Reply], None] = lambda reply: None,
) -> dict[str, Reply]:
    """Ask sites and wait: site -> valid reply, in the order of the requests.

    requests: (site, node id, message) each. check: raises ProtocolError when the content is not acceptable.
    dropped: called with (site, reason) for every site whose reply is missing, refused or not valid.
    """
    replies = dict(answers(grid, exchange, requests, expected, deadline, dropped, check))
    return {site: replies[site] for site, _, _ in requests if site in replies}


def answers(
    grid: Grid,
    exchange: Exchange,
    requests: Sequence[tuple[str, int, WireMessage]],
    expected: type[Reply] | tuple[type[Reply], ...],
    deadline: float,
    dropped: Callable[[str, str], None],
    check: Callable[[Reply], None] = lambda reply: None,
) -> Iterator[tuple[str, Reply]]:
    """Ask sites as ask() does, and yield each valid (site, reply) as it comes.

    expected: one kind of reply, or as many kinds as there are requests to one site.
    """
    kinds = expected if isinstance(expected, tuple) else (expected,)
    waiting = Counter(site for site, _, _ in requests)
    stamps: dict[str, list[Stamp]] = {}
    for site, _, request in requests:
        exchange.bytes_down += request.tensor_bytes
        if isinstance(request, Stamp):
            stamps.setdefault(site, []).append(request)
    for site, message in exchange.run(grid, requests, deadline):
        waiting[site] -= 1
        try:
            reply = checked(message, kinds, stamps.get(site, ()))
            check(reply)
        except ProtocolError as error:
            dropped(site, shown(str(error), REASON))
        else:
            exchange.bytes_up += reply.tensor_bytes
            yield site, reply
    for site, missing in waiting.items():
        if missing:
            dropped(site, f"{NO_ANSWER} {deadline:.0f} s")


def checked(message: Message, kinds: Sequence[type[Reply]], requests: Sequence[Stamp]) -> Reply:
    """Parse a message as a reply of one of these kinds to one of these requests.

    Raises ProtocolError if it is an error, a refusal, of another kind, or stale.
    """
    if message.has_error():
        raise ProtocolError(describe_error(message.error.reason or "unknown"))
    found = read_kind(message.content)
    if found == Refusal.__name__:
        refusal = Refusal.from_record(message.content)
        raise ProtocolError(f"{refusal.kind}: {refusal.reason}")
    by_name = {kind.__name__: kind for kind in kinds}
    reply = by_name.get(found, kinds[0]).from_record(message.content)
    if isinstance(reply, Stamp) and requests:
        fits = [request for request in requests if not request.mismatch(reply)]
        require_same_round((fits or requests)[0], reply)
    return reply


def check_counts(reply: EvaluateReply, noise: CountNoise | None = None) -> None:
    """Raise ProtocolError if a site's counts cannot be true. noise: that the experiment adds to them."""
    if not len(reply.correct) == len(reply.total) == reply.num_classes:
        raise ProtocolError(
            f"EvaluateReply: counts of {len(reply.total)} classes, expected {reply.num_classes}"
        )
    check_possible(reply.correct, reply.total, noise)
    check_withheld(reply.withheld, reply.total)


def check_possible(correct: Sequence[int], total: Sequence[int], noise: CountNoise | None) -> None:
    """Raise ProtocolError for counts that cannot be true; with noise any counts can."""
    if noise is None and any(not 0 <= right <= n for right, n in zip(correct, total, strict=True)):
        raise ProtocolError("correct, total: more right answers than samples, or fewer than none")


def check_withheld(withheld: Sequence[int] | None, total: Sequence[int]) -> None:
    """Raise ProtocolError if a withheld class does not exist, or has counts all the same."""
    for label in withheld or ():
        if label >= len(total) or total[label]:
            raise ProtocolError(
                f"withheld: found class {label}; allowed a class of this task, without counts"
            )
