"""A site's part in one attempt: prepare, mask once, sign one set of survivors, open once.

The state is JSON-able and small, so that a site writes it to disk before it answers; a site that was killed
goes on where it was, and answers the same request with the same bytes. It refuses a request that comes out
of turn, or again with other content.

Bonawitz et al. 2017 (eprint 2017/281), figure 4; fresh mask keys and self-mask seeds for each attempt.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, Self, get_args

from perennial.foundation.errors import ProtocolError
from perennial.privacy.secure.keys import (
    SHARE_BYTES,
    Words,
    add_masks,
    agree,
    derive,
    derive_agreement_key,
    draw_secret,
    join_parts,
    seal,
    sign,
    split,
    unseal,
    verify_signature,
)
from perennial.privacy.secure.roster import (
    Attempt,
    Member,
    Parameters,
    Peer,
    Subject,
    Trust,
    check_order,
    hash_peers,
    hash_roster,
    require,
)

Stage = Literal["prepared", "masked", "signed", "opened"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which an attempt goes through them."""


@dataclass(frozen=True)
class Advert:
    """A site's membership and sealed shares, sent ahead of an attempt.

    shares: other site -> its shares of the mask key and of the self mask's seed, sealed for it.
    """

    member: Member
    shares: Mapping[str, str]


@dataclass(frozen=True)
class Opening:
    """Shares that a site gives out: of the seeds of survivors, of the mask keys of those that are gone."""

    seeds: Mapping[str, str]
    keys: Mapping[str, str]


@dataclass
class SiteSession:
    """One site, one attempt. Build it with prepare() or from_json()."""

    name: str
    attempt: Attempt
    parameters: Parameters
    peers: list[Peer]
    mask_secret: str
    seed: str
    sealed: dict[str, str]
    member: Member
    held: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By site of the roster: shares of (mask key, seed)."""
    subject: Subject | None = None
    members: list[Member] = field(default_factory=list)
    closes: list[str] = field(default_factory=list)
    """What this site's value tells of; opened, it goes into no sum of other sites."""
    survivors: list[str] = field(default_factory=list)
    vote: str = ""
    stage: Stage = "prepared"

    # ahead of the attempt

    @classmethod
    def prepare(
        cls,
        name: str,
        attempt: Attempt,
        parameters: Parameters,
        peers: Sequence[Peer],
        cipher: bytes,
        identity: bytes,
        trust: Trust,
    ) -> Self:
        """Fresh mask key and seed, and their shares for all the peers.

        peers: everybody who may be in the roster, this site among them, by name. cipher, identity: this
        site's private keys. Raises PolicyRefusal when so few peers can never make a safe sum or a peer is not
        trusted, ProtocolError when the list is malformed.
        """
        check_order([peer.name for peer in peers], "peers")
        parameters.check_roster(len(peers))
        own = next((peer for peer in peers if peer.name == name), None)
        if own is None or own.cipher != derive_agreement_key(cipher):
            raise ProtocolError(f"secure: the peers do not list site {name!r} with its key of this task")
        for peer in peers:
            peer.check(attempt.run, attempt.task, trust)
        digest = hash_peers(attempt, peers)
        position = [peer.name for peer in peers].index(name)
        holders = range(len(peers))
        mask_secret, seed = draw_secret(), draw_secret()
        points = [holder + 1 for holder in holders]
        threshold = parameters.compute_threshold(len(peers))
        key_shares, seed_shares = split(mask_secret, points, threshold), split(seed, points, threshold)
        sealed, held = {}, {}
        for holder in holders:
            peer = peers[holder]
            both = key_shares[holder + 1], seed_shares[holder + 1]
            if holder == position:
                held[name] = (both[0].hex(), both[1].hex())
            else:
                info = attempt.bound("shares", digest, name, peer.name)
                sealed[peer.name] = seal(cipher, info, b"".join(both), peer.cipher)
        member = Member.sign(attempt, digest, name, derive_agreement_key(mask_secret), seed, identity)
        return cls(
            name, attempt, parameters, list(peers), mask_secret.hex(), seed.hex(), sealed, member, held
        )

    @property
    def advert(self) -> Advert:
        """The membership and sealed shares for the server, the same at each call."""
        return Advert(self.member, self.sealed)

    # the masked input

    def enrol(self, subject: Subject, members: Sequence[Member]) -> None:
        """Accept the attempt's roster, and what its sum is about; the same ones again change nothing.

        members: those peers that will send masked values, by name. Raises PolicyRefusal for another roster or
        subject than before, or a roster too small to be opened; ProtocolError when it is malformed, not
        signed, or lacks this site.
        """
        if self.subject is not None:
            require(
                (subject, list(members)) == (self.subject, self.members),
                f"attempt {self.attempt.number} was asked with another roster or for another sum",
            )
            return
        check_order([member.name for member in members], "roster")
        self.parameters.check_roster(len(members))
        known = {peer.name: peer for peer in self.peers}
        for member in members:
            peer = known.get(member.name)
            if peer is None:
                raise ProtocolError(f"secure: roster: site {member.name!r} is none of the peers")
            member.check(self.attempt, self._peers_hash, peer)
        if self.member not in members:
            raise ProtocolError("secure: roster: this site is not in it with its own mask key")
        self.subject, self.members = subject, list(members)

    def mask(self, words: Words) -> None:
        """Mask words in place: the self mask, and one with each other site of the roster. Once.

        words: (N,). Raises PolicyRefusal when this attempt has masked values already; those
        are to be sent again.
        """
        require(self.stage == "prepared" and bool(self.members), "this attempt has masked its values already")
        mine, digest = bytes.fromhex(self.mask_secret), self._roster_hash
        plus = [derive(bytes.fromhex(self.seed), self.attempt.bound("self mask", self.name, digest))]
        minus: list[bytes] = []
        for member in self.members:
            if member.name in self._others:
                pair = sorted((self.name, member.name))
                seed = agree(mine, member.mask, self.attempt.bound("pair mask", *pair, digest))
                (plus if self.name == pair[0] else minus).append(seed)
        add_masks(words, plus)
        add_masks(words, minus, subtract=True)
        self.advance("masked")

    def advance(self, stage: Stage) -> None:
        """Go on to a stage, and keep no secret that only earlier ones need.

        Masked, the site needs neither its mask key nor its seed again; opened, no share but those it gave.
        This changes the session in memory alone: the caller writes it to disk before it answers.
        """
        assert STAGES.index(stage) >= STAGES.index(self.stage)
        self.stage = stage
        self.mask_secret = self.seed = ""
        if stage == "opened":
            here = set(self.survivors)
            self.held = {
                name: ("", seed) if name in here else (key, "") for name, (key, seed) in self.held.items()
            }
            self.sealed = {}

    # the opening

    def sign(
        self, survivors: Sequence[str], shares: Mapping[str, str], cipher: bytes, identity: bytes
    ) -> str:
        """A signature over the set of survivors; over one set only, and the same bytes when asked again.

        shares: what the members sealed for this site, by sender; one that cannot be opened is left out, for
        its sender harms nobody but itself. cipher, identity: this site's private keys.
        Raises PolicyRefusal when the set is another one than before, too small, or without this site.
        """
        if self.stage in ("signed", "opened"):
            require(
                list(survivors) == self.survivors,
                f"attempt {self.attempt.number} was signed with other survivors; a shrunk set is refused",
            )
            return self.vote
        require(self.stage == "masked", "no masked values of this attempt were sent")
        check_order(survivors, "survivors")
        require(
            set(survivors) <= {member.name for member in self.members} and self.name in survivors,
            "survivors: found sites outside the roster, or this site is missing",
        )
        self._check_survivors(survivors)
        self._hold(shares, cipher)
        self.survivors = list(survivors)
        self.advance("signed")
        self.vote = sign(identity, self._vote_content)
        return self.vote

    def open(self, survivors: Sequence[str], votes: Mapping[str, str]) -> Opening:
        """The shares that take the masks off the sum: for each site one kind, never both.

        A site opens once for an attempt; the same request again gets the same shares.
        votes: signatures by survivor. Raises PolicyRefusal without a threshold of valid ones over this set.
        """
        require(self.stage in ("signed", "opened"), "nothing of this attempt was signed")
        require(
            list(survivors) == self.survivors,
            f"attempt {self.attempt.number}: a second unmasking, of another set of survivors",
        )
        known = {peer.name: peer.identity for peer in self.peers}
        content, voters = self._vote_content, sorted(set(survivors) & votes.keys())
        valid = sum(verify_signature(known[name], content, votes[name]) for name in voters)
        needed = self.parameters.compute_threshold(len(self.peers))
        require(valid >= needed, f"survivors: {valid} valid signatures over this set, {needed} are needed")
        self.advance("opened")
        here = set(survivors)
        return Opening(
            seeds={name: seed for name, (_, seed) in self.held.items() if name in here},
            keys={name: key for name, (key, _) in self.held.items() if name not in here},
        )

    # on disk

    def to_json(self) -> dict[str, Any]:
        """The whole session, secrets included, JSON-able: for the site's own disk."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The session that to_json() gave."""
        parsed = {
            "attempt": Attempt(**values["attempt"]),
            "parameters": Parameters(**values["parameters"]),
            "peers": [Peer(**peer) for peer in values["peers"]],
            "member": Member(**values["member"]),
            "members": [Member(**member) for member in values["members"]],
            "subject": None if values["subject"] is None else Subject(**values["subject"]),
            "held": {name: (both[0], both[1]) for name, both in values["held"].items()},
        }
        return cls(**{**values, **parsed})

    # what follows from the above

    @cached_property
    def _peers_hash(self) -> bytes:
        return hash_peers(self.attempt, self.peers)

    @property
    def _roster_hash(self) -> bytes:
        assert self.subject is not None
        return hash_roster(self._peers_hash, self.subject, self.members)

    @cached_property
    def _others(self) -> set[str]:
        return {peer.name for peer in self.peers} - {self.name}

    @property
    def _vote_content(self) -> bytes:
        return vote_content(self.attempt, self._roster_hash, self.survivors)

    def _hold(self, shares: Mapping[str, str], cipher: bytes) -> None:
        known, members = {peer.name: peer for peer in self.peers}, {member.name for member in self.members}
        for sender in sorted(shares.keys() & members & self._others):
            info = self.attempt.bound("shares", self._peers_hash, sender, self.name)
            with suppress(ProtocolError):
                raw = unseal(cipher, info, shares[sender], known[sender].cipher)
                self.held[sender] = (raw[:SHARE_BYTES].hex(), raw[SHARE_BYTES:].hex())

    def _check_survivors(self, survivors: Sequence[str]) -> None:
        self.parameters.check_survivors(len(self.members), len(survivors))
        needed = self.parameters.compute_threshold(len(self.peers))
        require(len(survivors) >= needed, f"survivors: {len(survivors)}, {needed} open a secret")


def vote_content(attempt: Attempt, roster: bytes, survivors: Sequence[str]) -> bytes:
    """Bytes that a survivor signs: the attempt, the roster's hash and the set of survivors."""
    return attempt.bound("survivors", roster, join_parts(*survivors))
