"""Masked sums over the sites: shares ahead, masked values, votes, the opening.

Each phase is one exchange. What is missing is named, and a sum of which too few sites are there is not opened
at all. Once sites have been asked for shares, no other attempt at that sum is made: the same opening is asked
for again, in the next round if need be. A sum of no use, or whose masks do not come off, is not kept, and the
very same sites are asked for another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.serverapp import Grid

from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError
from perennial.privacy.secure.keys import Words, require_usable_key
from perennial.privacy.secure.roster import Attempt, Member, Peer, Subject, hash_peers
from perennial.privacy.secure.server_session import NotEnough, ServerSession
from perennial.privacy.secure.site_session import Advert, Opening
from perennial.protocol.fields import WireMessage
from perennial.protocol.secure_messages import (
    IntroduceReply,
    IntroduceRequest,
    MaskedReply,
    OpenReply,
    OpenRequest,
    ShareReply,
    ShareRequest,
    VoteReply,
    VoteRequest,
)
from perennial.protocol.stamp import Maskable, Stamp
from perennial.strategies.round.exchange import Exchange, ask, yield_answers
from perennial.strategies.secure.store import Opened, SumStore

Read = TypeVar("Read")
Sites = Mapping[str, int]
Note = Callable[[str, str], None]
"""(site, reason) of a site that is not in the sum, or did not help to open it."""
Requests = Callable[[dict[str, Any]], list[tuple[str, int, WireMessage]]]
"""Fields of a Maskable -> requests, for the sites of the roster."""
ONCE = ("statistics",)
"""What a site gives once in its life, so that an opening that failed must not be given up for another sum."""
AFTER_VALUES = "after its masked values:"
"""Begins the reason of a site that did not vote or gave no shares."""


class MaskedSums:
    """The masked sums of a run. folder: where progress is kept; None: nowhere. store: what is kept there."""

    def __init__(self, experiment: Experiment, folder: Path | None) -> None:
        assert experiment.secure is not None
        self.experiment, self.settings = experiment, experiment.secure
        self.parameters = experiment.secure.parameters(shared_noise=experiment.privacy.shared)
        self.exchange = Exchange()
        self.store = SumStore(folder)
        self._peers: dict[str, Peer] = {}
        self._task = 0
        self._ahead: tuple[Attempt, list[Peer], dict[str, Advert]] | None = None

    def collect(
        self,
        grid: Grid,
        statistic: str,
        about: str,
        requests: Sequence[tuple[str, int, Maskable]],
        deadline: float,
        note: Note,
        length: int,
        read: Callable[[Opened], Read],
    ) -> tuple[Opened, Read]:
        """The sum of what sites answer to requests that differ by site in nothing that the sum is about.

        It is the one entry for integers of any kind; config/secure_words.py makes words of them, and
        client/secure_values.py sends them.

        statistic: what the integers are, one word. about: SHA-256 of what they are about; the site computes
        the same. requests: (site, node id, request) each. The rest, and what it returns: as in sum().
        """
        if not requests:
            raise NotEnough("no site is there")

        def attach_roster(fields: dict[str, Any]) -> list[tuple[str, int, WireMessage]]:
            return [(site, node, replace(request, **fields)) for site, node, request in requests]

        sites = {site: node for site, node, _ in requests}
        return self.sum(
            grid, requests[0][2], statistic, about, sites, deadline, attach_roster, note, length, read
        )

    def sum(
        self,
        grid: Grid,
        stamp: Stamp,
        statistic: str,
        model: str,
        sites: Sites,
        deadline: float,
        requests: Requests,
        note: Note,
        length: int,
        read: Callable[[Opened], Read],
        least: int = 0,
    ) -> tuple[Opened, Read]:
        """Ask sites for masked words and open their sum, or return it again if it was opened before.

        Returns the sum and what read() makes of it.

        stamp: of the round. statistic: kind of the words, such as update. model: SHA-256 of what they
        describe. sites: name -> node id of those to ask. deadline: seconds for each exchange. requests: from
        the roster's fields to (site, node id, request) of each. note: called with the name of a site that is
        not in the sum, or did not help to open it, and the reason. length: words of each site. read: reads
        the sum, and raises ValueError where no honest sites can have made it; then it is not kept, the error
        goes on, and the next call asks the same sites for another one. least: values that must be in the sum
        at the least. Raises NotEnough, saying what is missing, when the sum cannot be opened.
        """
        subject = Subject(stamp.round, statistic, model)
        for done in reversed(self.store.list_opened(statistic, model)):
            # another cohort's sum may be about the same
            if set(done.survivors) & sites.keys():
                return done, read(done)
        waiting = self.store.pending
        if waiting is not None and waiting.statistic in ONCE and waiting.model != model:
            raise NotEnough(f"the {waiting.statistic} of round {waiting.round} wait to be opened first")
        session = self.store.find_session(subject)
        models: dict[str, str] = {}
        if session is not None and not self._goes_on(session, subject):
            session = None
        if session is None or not session.closed:
            asked, least = self._leave_spent(subject, sites, least, note)
            if session is None or asked.keys() != {member.name for member in session.members}:
                session = self._start_session(grid, stamp, subject, asked, deadline, note, least)
            models = self._collect(grid, session, asked, deadline, requests, note, length, least)
        here = {name: sites[name] for name in session.survivors if name in sites}

        def note_afterwards(site: str, reason: str) -> None:
            """What left before is out, and was charged for: such a site did not refuse to take part."""
            note(site, reason if reason.startswith("no answer") else f"{AFTER_VALUES} {reason}")

        try:
            words = self._unmask(grid, stamp, session, here, deadline, note_afterwards)
        except ProtocolError as error:
            # no more shares would help: a site that dealt false ones could end the run for good
            self.store.keep_refused(subject, session)
            raise NotEnough(str(error)) from error
        roster = tuple(member.name for member in session.members)
        kept = tuple(sorted({*models.values()}))
        opened = Opened(words, tuple(session.survivors), roster, kept, session.attempt.number)
        try:
            found = read(opened)
        except ValueError:
            self.store.keep_refused(subject, session)
            raise
        self.store.keep_opened(subject, opened)
        return opened, found

    def _leave_spent(self, subject: Subject, sites: Sites, least: int, note: Note) -> tuple[Sites, int]:
        """(the sites that may be asked for a sum, how many of them must be in it).

        Those of a sum that was of no use give another one about the same all together alone: a sum over other
        sites, less that one, could be the value of a single site. The sites themselves insist on it.
        """
        for spent in self.store.list_refused(subject.statistic, subject.model):
            if spent <= sites.keys():
                return {name: node for name, node in sites.items() if name in spent}, len(spent)
            away = ", ".join(sorted(spent - sites.keys()))
            for name in sorted(spent & sites.keys()):
                note(name, f"its sum was of no use, and it gives another one only together with {away}")
            sites = {name: node for name, node in sites.items() if name not in spent}
        return sites, least

    def _goes_on(self, session: ServerSession, subject: Subject) -> bool:
        """Whether a sum that was begun before can still be finished, or has to be."""
        same_task = session.attempt.task == self._task or not self._task
        return session.opening or (same_task and session.subject == subject)

    # the phases

    def _unmask(
        self, grid: Grid, stamp: Stamp, session: ServerSession, here: Sites, deadline: float, note: Note
    ) -> Words:
        if not self.settings.masks:
            assert session.total is not None
            return session.total
        self._vote(grid, stamp, session, here, deadline, note)
        return self._open(grid, stamp, session, here, deadline, note)

    def _start_session(
        self,
        grid: Grid,
        stamp: Stamp,
        subject: Subject,
        sites: Sites,
        deadline: float,
        note: Note,
        least: int,
    ) -> ServerSession:
        """A new attempt with the masks that were made ahead.

        Fresh masks are made if a site that is here now was missing then, or so few of those that shared the
        masks are here that they could not open the sum.
        """
        here = {name: node for name, node in sites.items() if not self.exchange.is_busy(name)}
        if self._task != stamp.task:
            self._task, self._peers, self._ahead = stamp.task, {}, None
        if self._ahead is None or not self._has_masks_for(here):
            self._introduce(grid, stamp, here, deadline, note)
            known = {name: node for name, node in here.items() if name in self._peers}
            if len(known) < (needed := self.parameters.count_survivors_needed(len(known))):
                raise NotEnough(f"{len(known)} sites are ready for a sum that takes {needed}")
            shares = self._share_requests(stamp, known)
            replies = ask(grid, self.exchange, shares, ShareReply, deadline, note)
            self._take_shares(replies, note)
        assert self._ahead is not None
        (attempt, peers, adverts), self._ahead = self._ahead, None
        session = ServerSession(attempt, self.parameters, peers, subject)
        session.enrol(adverts, list(here), least)
        self.store.keep(session)
        return session

    def _has_masks_for(self, here: Sites) -> bool:
        """Whether the masks that were made ahead will do for a sum over these sites."""
        assert self._ahead is not None
        _, peers, adverts = self._ahead
        return here.keys() <= adverts.keys() and len(here) >= self.parameters.count_survivors_needed(
            len(peers)
        )

    def _introduce(self, grid: Grid, stamp: Stamp, sites: Sites, deadline: float, note: Note) -> None:
        fields = IntroduceRequest(**stamp.stamp_fields)
        new = [(name, node, fields) for name, node in sites.items() if name not in self._peers]
        for name, reply in ask(grid, self.exchange, new, IntroduceReply, deadline, note).items():
            peer = Peer(name, reply.identity, reply.cipher, reply.signature)
            # a key that the others refuse would keep all of them from every sum of the task
            with _leave_out(name, note):
                peer.check(stamp.run, stamp.task, lambda *_: None)
                require_usable_key(peer.cipher)
                self._peers[name] = peer

    def _share_requests(self, stamp: Stamp, sites: Sites) -> list[tuple[str, int, ShareRequest]]:
        """Requests for the masks of the next attempt, which is begun by them."""
        peers = [self._peers[name] for name in sorted(sites)]
        attempt = Attempt(stamp.run, stamp.task, self.store.issue_number())
        self._ahead = (attempt, peers, {})
        request = ShareRequest(
            **stamp.stamp_fields,
            attempt=attempt.number,
            peers=[peer.name for peer in peers],
            peer_identities=[peer.identity for peer in peers],
            peer_ciphers=[peer.cipher for peer in peers],
            peer_signatures=[peer.signature for peer in peers],
        )
        return [(name, node, request) for name, node in sites.items()]

    def _take_shares(self, replies: Mapping[str, ShareReply], note: Note) -> None:
        if self._ahead is None:
            return
        attempt, peers, adverts = self._ahead
        for name, reply in replies.items():
            if reply.attempt != attempt.number:
                continue
            member = Member(name, reply.mask, reply.commitment, reply.signature)
            with _leave_out(name, note):
                member.check(attempt, hash_peers(attempt, peers), self._peers[name])
                require_usable_key(member.mask)
                adverts[name] = Advert(member, _match_shares(reply.receivers, reply.shares))

    def _collect(
        self,
        grid: Grid,
        session: ServerSession,
        sites: Sites,
        deadline: float,
        requests: Requests,
        note: Note,
        length: int,
        least: int,
    ) -> dict[str, str]:
        """Add up the masked values as they come; returns the hash of the model that each site keeps."""
        session.survivors, session.total = [], None
        members = [member for member in session.members if member.name in sites]
        fields = {
            "attempt": session.attempt.number,
            "roster": [member.name for member in session.members],
            "roster_masks": [member.mask for member in session.members],
            "roster_commitments": [member.commitment for member in session.members],
            "roster_signatures": [member.signature for member in session.members],
        }
        names = {member.name for member in members}
        messages = [each for each in requests(fields) if each[0] in names]
        models = {}

        def check(reply: MaskedReply) -> None:
            if reply.attempt != session.attempt.number:
                raise ProtocolError(f"MaskedReply: attempt: found {reply.attempt}")

        for name, reply in yield_answers(grid, self.exchange, messages, MaskedReply, deadline, note, check):
            try:
                session.add(name, _read_words(reply), length)
                models[name] = reply.model
            except ProtocolError as error:
                note(name, str(error))
        session.close(least)
        self.store.keep(session, total=True)
        return models

    def _vote(
        self, grid: Grid, stamp: Stamp, session: ServerSession, here: Sites, deadline: float, note: Note
    ) -> None:
        """Signatures over the survivors."""
        asked = []
        for name, node in here.items():
            if name not in session.votes:
                shares = session.select_shares(name)
                request = VoteRequest(
                    **self._stamp(stamp, session),
                    attempt=session.attempt.number,
                    survivors=session.survivors,
                    senders=list(shares),
                    shares=list(shares.values()),
                )
                asked.append((name, node, request))
        for name, reply in ask(grid, self.exchange, asked, VoteReply, deadline, note).items():
            try:
                session.add_vote(name, reply.signature)
            except ProtocolError as error:
                note(name, str(error))
        session.require_votes()
        session.opening = True
        self.store.keep(session)

    def _open(
        self, grid: Grid, stamp: Stamp, session: ServerSession, here: Sites, deadline: float, note: Note
    ) -> Words:
        """Shares that open the sum; beside them, those of the next attempt."""
        fields = OpenRequest(
            **self._stamp(stamp, session),
            attempt=session.attempt.number,
            survivors=session.survivors,
            voters=list(session.votes),
            votes=list(session.votes.values()),
        )
        asked: list[tuple[str, int, WireMessage]] = [(name, node, fields) for name, node in here.items()]
        ahead = {name: node for name, node in here.items() if name in self._peers}
        same_task = session.attempt.task == self._task == stamp.task
        if same_task and len(ahead) >= self.parameters.count_survivors_needed(len(ahead)):
            asked += self._share_requests(stamp, ahead)
        shares: dict[str, ShareReply] = {}
        for name, reply in yield_answers(grid, self.exchange, asked, (OpenReply, ShareReply), deadline, note):
            if isinstance(reply, ShareReply):
                shares[name] = reply
            else:
                given = Opening(
                    _match_shares(reply.seeds_of, reply.seeds), _match_shares(reply.keys_of, reply.keys)
                )
                session.add_opening(name, given)
        self._take_shares(shares, note)
        try:
            return session.open(note)
        finally:
            # without the shares that were found to be false
            self.store.keep(session)

    def _stamp(self, stamp: Stamp, session: ServerSession) -> dict[str, Any]:
        """The stamp of the round in which the attempt began."""
        return {**stamp.stamp_fields, "round": session.subject.round}


@contextmanager
def _leave_out(name: str, note: Note) -> Iterator[None]:
    """Name the site whose keys are false in place of raising ProtocolError."""
    try:
        yield
    except ProtocolError as error:
        note(name, str(error))


def _read_words(reply: MaskedReply) -> Words:
    if set(reply.words) != {"words"} or reply.words["words"].dim() != 1:
        raise ProtocolError(f"MaskedReply: words: found {sorted(reply.words)}, allowed one vector `words`")
    values = reply.words["words"].cpu().numpy()
    if values.dtype != np.int64:
        raise ProtocolError(f"MaskedReply: words: found {values.dtype}, allowed int64")
    return values.view(np.uint64)


def _match_shares(names: list[str], shares: list[str]) -> dict[str, str]:
    return dict(zip(names, shares, strict=False))
