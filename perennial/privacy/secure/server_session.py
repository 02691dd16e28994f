"""The server's part in one attempt: collect, relay, add up, and take the masks off the sum.

The server is not trusted with anything here: what it holds are sealed shares, masked values, their sum, and
after the opening the masks of the sum. The state is JSON-able beside the sum itself, so that a server that
was killed goes on in the same phase.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import comb
from secrets import SystemRandom
from typing import Any, Self

import numpy as np

from perennial.foundation.errors import ProtocolError
from perennial.privacy.secure.keys import (
    Words,
    add_masks,
    agree,
    derive,
    derive_agreement_key,
    join,
    verify_signature,
)
from perennial.privacy.secure.roster import (
    Attempt,
    Member,
    Parameters,
    Peer,
    Subject,
    commit,
    hash_peers,
    hash_roster,
)
from perennial.privacy.secure.site_session import Advert, Opening, vote_content

MOST_TRIES = 1000
"""Choices among the shares of a secret that are tried when some of the shares are false."""

Note = Callable[[str, str], None]
"""(site, what is wrong with what it sent)"""


class NotEnough(Exception):
    """This attempt cannot be opened; the message says what is missing."""


@dataclass
class ServerSession:
    """One attempt. total: (N,) the sum of the masked values so far."""

    attempt: Attempt
    parameters: Parameters
    peers: list[Peer]
    subject: Subject
    members: list[Member] = field(default_factory=list)
    sealed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By sender, then receiver."""
    survivors: list[str] = field(default_factory=list)
    closed: bool = False
    """Whether the set of survivors is fixed."""
    opening: bool = False
    """Whether sites were asked for shares: from then on no other attempt at this sum can be made."""
    votes: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, dict[str, str]] = field(default_factory=dict)
    """By site whose seed it is, then by who gave the share."""
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    total: Words | None = field(default=None, repr=False)

    def enrol(self, adverts: Mapping[str, Advert], wanted: Sequence[str], least: int = 0) -> None:
        """Put the wanted sites that sent an advert on the roster. Raises NotEnough for too few.

        least: sites that there must be at the least, beside what the parameters say.
        """
        names = sorted(set(wanted) & adverts.keys() & {peer.name for peer in self.peers})
        self.members = [adverts[name].member for name in names]
        self.sealed = {name: dict(adverts[name].shares) for name in names}
        needed = max(least, self.parameters.count_survivors_needed(len(names)))
        if len(names) < needed:
            raise NotEnough(f"{len(names)} sites are ready for a sum that takes {needed}")

    def select_shares(self, name: str) -> dict[str, str]:
        """The sealed shares addressed to one member, by sender."""
        return {sender: shares[name] for sender, shares in self.sealed.items() if name in shares}

    def add(self, name: str, words: Words, length: int) -> None:
        """Add one member's masked values, (N,). Raises ProtocolError on a second time or another shape.

        length: N, from what the server asked for: no site's reply may say how long the others' are.
        """
        if name in self.survivors or self.closed:
            raise ProtocolError("masked values: came twice, or after the set of survivors was fixed")
        if name not in {member.name for member in self.members}:
            raise ProtocolError("masked values: of a site outside the roster")
        if words.shape != (length,) or words.dtype != np.uint64:
            raise ProtocolError(f"masked values: found {words.dtype} {words.shape}, expected {length} words")
        if self.total is None:
            self.total = np.zeros(length, np.uint64)
        np.add(self.total, words, out=self.total)
        self.survivors = sorted([*self.survivors, name])

    def close(self, least: int = 0) -> None:
        """Stop taking masked values. Raises NotEnough when too few came for the sites to open their sum.

        least: as in enrol().
        """
        needed = max(least, self.parameters.count_survivors_needed(len(self.members)))
        if len(self.survivors) < needed:
            raise NotEnough(
                f"{len(self.survivors)} of {len(self.members)} masked values came, {needed} are needed"
            )
        self._require(len(self.survivors), "masked values")
        self.closed = True

    def add_vote(self, name: str, signature: str) -> None:
        """Keep one survivor's signature. Raises ProtocolError when it is not over this set of survivors."""
        identity = next(peer.identity for peer in self.peers if peer.name == name)
        known = self.closed and name in self.survivors
        if not known or not verify_signature(identity, self._vote_content, signature):
            raise ProtocolError("signature: not this site's over these survivors")
        self.votes[name] = signature

    def require_votes(self) -> None:
        """Raises NotEnough when too few signatures came for a survivor to open the sum."""
        self._require(len(self.votes), "signatures over the survivors")

    def add_opening(self, name: str, opening: Opening) -> None:
        """Keep one survivor's shares of survivors' seeds and of absent members' keys; ignore all others."""
        here, gone = set(self.survivors), {member.name for member in self.members} - set(self.survivors)
        for of, share in opening.seeds.items():
            if of in here:
                self.seeds.setdefault(of, {})[name] = share
        for of, share in opening.keys.items():
            if of in gone:
                self.keys.setdefault(of, {})[name] = share

    def open(self, note: Note) -> Words:
        """The sum of the survivors' values, (N,).

        note: called with the name of a site that gave a false share, and the reason; the share is dropped.
        Raises NotEnough when too few sites gave shares, and ProtocolError when enough did and a secret does
        not come of what they gave.
        """
        assert self.total is not None
        givers = {by for given in (self.seeds, self.keys) for shares in given.values() for by in shares}
        self._require(len(givers), "sites gave shares")
        total, digest = self.total.copy(), self._roster_hash
        members = {member.name: member for member in self.members}
        minus: list[bytes] = []
        plus: list[bytes] = []
        for name in self.survivors:
            seed = self._recover(members[name], note)
            minus.append(derive(seed, self.attempt.bound("self mask", name, digest)))
        for member in self.members:
            if member.name in self.survivors:
                continue
            secret = self._recover(member, note)
            for name in self.survivors:
                pair = sorted((member.name, name))
                seed = agree(secret, members[name].mask, self.attempt.bound("pair mask", *pair, digest))
                # what the survivor added is taken off, what it took off is added
                (minus if name == pair[0] else plus).append(seed)
        add_masks(total, minus, subtract=True)
        add_masks(total, plus)
        return total

    def to_json(self) -> dict[str, Any]:
        """The session without the sum, JSON-able."""
        values = asdict(replace(self, total=None))
        del values["total"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], total: Words | None) -> Self:
        """The session that to_json() gave, with the sum so far."""
        parsed = {
            "attempt": Attempt(**values["attempt"]),
            "parameters": Parameters(**values["parameters"]),
            "peers": [Peer(**peer) for peer in values["peers"]],
            "members": [Member(**member) for member in values["members"]],
            "subject": Subject(**values["subject"]),
        }
        return cls(**{**values, **parsed}, total=total)

    def _require(self, found: int, what: str) -> None:
        if found < self._threshold:
            raise NotEnough(f"{found} {what}, {self._threshold} are needed")

    def _recover(self, member: Member, note: Note) -> bytes:
        """The seed of a survivor, or the mask key of another member, proved by what the member signed.

        Shares that are not of it are dropped. Raises ProtocolError when no choice of shares gives it.
        """
        here = member.name in self.survivors
        what = f"{'seed' if here else 'mask key'} of site {member.name!r}"
        shares = (self.seeds if here else self.keys).get(member.name, {})
        points = {peer.name: point for point, peer in enumerate(self.peers, 1)}

        def join_of(names: Sequence[str]) -> bytes | None:
            try:
                return join({points[name]: bytes.fromhex(shares[name]) for name in sorted(names)})
            except ProtocolError:
                return None

        def proves(secret: bytes) -> bool:
            if here:
                return commit(secret) == member.commitment
            return derive_agreement_key(secret) == member.mask

        givers = sorted(shares)
        for chosen in _yield_choices(givers, self._threshold):
            secret = join_of(chosen)
            if secret is not None and proves(secret):
                break
        else:
            raise ProtocolError(
                f"the {what} does not come of the {len(shares)} shares of it that sites gave: that site "
                "dealt out false ones, or several sites gave false ones"
            )
        if list(chosen) != givers[: len(chosen)]:
            for by in sorted(set(givers) - set(chosen)):
                # in the place of a true share only another true one gives the same secret
                if join_of([*chosen[1:], by]) != secret:
                    del shares[by]
                    note(by, f"gave a false share of the {what}, or got a false one from that site")
        return secret

    @property
    def _roster_hash(self) -> bytes:
        return hash_roster(hash_peers(self.attempt, self.peers), self.subject, self.members)

    @cached_property
    def _vote_content(self) -> bytes:
        """What survivors sign; fixed when their set is closed."""
        return vote_content(self.attempt, self._roster_hash, self.survivors)

    @property
    def _threshold(self) -> int:
        """Shares that open a secret."""
        return self.parameters.compute_threshold(len(self.peers))


def _yield_choices(names: Sequence[str], many: int) -> Iterator[Sequence[str]]:
    """Choices of so many names, the first ones first: all of them, or MOST_TRIES drawn ones."""
    if comb(len(names), many) <= MOST_TRIES:
        yield from combinations(names, many)
        return
    yield names[:many]
    # nobody may foresee which shares are tried together
    for _ in range(MOST_TRIES):
        yield SystemRandom().sample(names, many)
