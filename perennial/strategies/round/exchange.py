"""One exchange with the sites: requests go out together, replies come in until a deadline."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from perennial.foundation.errors import ERROR, NO_ANSWER, NOT_APPROVED, REASON, ProtocolError, clean_text
from perennial.privacy.noised_counts import CountNoise
from perennial.protocol.fields import WireMessage, read_kind
from perennial.protocol.messages import EvaluateReply, Refusal, TrainRequest
from perennial.protocol.stack import list_answered as answered
from perennial.protocol.stack import split_replies
from perennial.protocol.stamp import Stamp, require_same_round

FIRST_POLL = 0.005
REST = 4.0
"""Times the length of a look for replies that is waited until the next."""
SLOWEST_POLL = 0.5
"""Seconds between looks at the grid: short rounds are noticed at once, long ones cost few looks."""


class Owed(NamedTuple):
    """A reply that missed its deadline.

    until: the time, by the monotonic clock, at which we stop accepting it.
    update: whether training was asked for.
    """

    site: str
    until: float
    update: bool


@dataclass
class Exchange:
    """Remembers which site still owes a reply from an earlier round, so that a late one is recognised.

    A late update waits for the next round of training, whatever is asked in between. Any other late reply is
    dropped: nobody needs it any more, and its site was named when the deadline passed.
    """

    slowest_poll: float = SLOWEST_POLL
    owed: dict[str, Owed] = field(default_factory=dict)
    """By message id."""
    late: list[tuple[str, Message]] = field(default_factory=list)
    """(site, late update) that no round of training has taken yet."""
    asked: dict[str, str] = field(default_factory=dict)
    """Site by message id, of the newest requests and of those still owed: an error that the SuperLink makes
    in place of a site names none."""
    names: dict[int, str] = field(default_factory=dict)
    """Site by node id, of all rounds so far."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the tensors of all queries beside training, and of their replies."""

    def is_busy(self, site: str) -> bool:
        """Whether the site still works on a request of an earlier round."""
        now = time.monotonic()
        self.owed = {message: owed for message, owed in self.owed.items() if owed.until > now}
        return any(owed.site == site for owed in self.owed.values())

    def find_site(self, reply: Message) -> str:
        """The site that a reply is from, by the request that it answers, else by its node."""
        node = reply.metadata.src_node_id
        return self.asked.get(reply.metadata.reply_to_message_id) or self.names.get(node, f"node-{node}")

    def find_sites(self, reply: Message) -> list[str]:
        """The sites that a reply is from, which may be several that trained in one pass."""
        return [self.asked[message_id] for message_id in answered(reply)]

    def settle(self, grid: Grid, sites: Collection[str], enough: int) -> None:
        """Wait until at least `enough` of the sites owe no reply.

        A site owes none once its late reply has come, or once we no longer wait for it. Late updates are kept
        for a later round of training; other late replies are dropped.
        """
        pause = FIRST_POLL
        while sum(not self.is_busy(site) for site in sites) < min(enough, len(sites)):
            if self._let_in(grid.pull_messages([*self.owed])):
                pause = FIRST_POLL
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, self.slowest_poll)

    def train(
        self,
        grid: Grid,
        requests: Sequence[tuple[str, int, WireMessage]],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Message]]:
        """Send requests for training as run() does; yields late updates too, which their stamps tell apart.

        The late update of a site that is asked again comes last, because a newer one counts before it.
        """
        asked = {site for site, _, _ in requests}
        for answer in self.run(grid, requests, deadline, meanwhile):
            yield from self._take_late(but_of=asked)
            yield answer
            del answer
        yield from self._take_late()

    def run(
        self,
        grid: Grid,
        requests: Sequence[tuple[str, int, WireMessage]],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Message]]:
        """Send requests, (site, node id, message) each, and yield (site, reply) as replies come.

        Ends when every request has its reply or after deadline seconds. Replies to earlier requests are not
        among those yielded. meanwhile: called once, after the requests are out.
        """
        # a request makes its record once, so that a model that goes to many sites is serialised once
        messages = [
            Message(request.record, node, request.message_type, ttl=2 * deadline)
            for _, node, request in requests
        ]
        waiting: dict[str, str] = {}
        for (site, _, _), message_id in zip(requests, grid.push_messages(messages), strict=True):
            if message_id:
                waiting[message_id] = site
        owing = {message: owed.site for message, owed in self.owed.items()}
        self.asked = owing | {late.metadata.reply_to_message_id: site for site, late in self.late} | waiting
        meanwhile()
        start = time.monotonic()
        pause = FIRST_POLL
        while waiting and time.monotonic() - start < deadline:
            found, looked = False, time.monotonic()
            for reply in grid.pull_messages([*waiting, *self.owed]):
                sites = [waiting.pop(message_id, "") for message_id in answered(reply)]
                if sites[0]:
                    found = True
                    yield sites[0], reply
                else:
                    found |= self._let_in([reply])
                # in a simulation the next look trains the next site, and an update is as large as a model
                del reply
            if found:
                pause = FIRST_POLL
            elif waiting:
                # over a network a look costs both ends, so most of the time goes by without one
                pause = max(pause, REST * (time.monotonic() - looked))
                time.sleep(min(pause, self.slowest_poll, max(0.0, deadline - (time.monotonic() - start))))
                pause = min(1.5 * pause, self.slowest_poll)
        patience = time.monotonic() + deadline
        training = {site for site, _, request in requests if isinstance(request, TrainRequest)}
        self.owed |= {
            message_id: Owed(site, patience, site in training) for message_id, site in waiting.items()
        }

    def _let_in(self, replies: Iterable[Message]) -> bool:
        """Keep the late updates among replies, and let other late ones go; whether there was any."""
        found = False
        for reply in (each for several in replies for each in split_replies(several)):
            if owed := self.owed.pop(reply.metadata.reply_to_message_id, None):
                found = True
                if owed.update:
                    self.late.append((owed.site, reply))
        return found

    def _take_late(self, but_of: Collection[str] = ()) -> list[tuple[str, Message]]:
        taken = [entry for entry in self.late if entry[0] not in but_of]
        self.late = [entry for entry in self.late if entry[0] in but_of]
        return taken


Reply = TypeVar("Reply", bound=WireMessage)


def describe_error(reason: str) -> str:
    """In words for the operator, why Flower says that no ClientApp answered a message.

    A site runs approved apps only (deploy/pinned_app.py); its refusal of another becomes NOT_APPROVED, and so
    does an error of a plain SuperNode in unpacking it. Any other reason is returned with ERROR before it.
    """
    unpacked = "/apps/" in reason and ("PermissionError" in reason or "Read-only file system" in reason)
    if unpacked or NOT_APPROVED in reason:
        return NOT_APPROVED
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
    replies = dict(yield_answers(grid, exchange, requests, expected, deadline, dropped, check))
    return {site: replies[site] for site, _, _ in requests if site in replies}


def yield_answers(
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
            reply = parse_reply(message, kinds, stamps.get(site, ()))
            check(reply)
        except ProtocolError as error:
            dropped(site, clean_text(str(error), REASON))
        else:
            exchange.bytes_up += reply.tensor_bytes
            yield site, reply
    for site, missing in waiting.items():
        if missing:
            dropped(site, f"{NO_ANSWER} {deadline:.0f} s")


def parse_reply(message: Message, kinds: Sequence[type[Reply]], requests: Sequence[Stamp]) -> Reply:
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
        fits = [request for request in requests if not request.find_mismatch(reply)]
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
