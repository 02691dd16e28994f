"""The sites of an attempt with their signed keys, and the run and attempt that these are bound to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.privacy.secure.keys import (
    derive_agreement_key,
    derive_signing_key,
    join_parts,
    sign,
    verify_signature,
)

# With n sites in the roster of which c may collude with the server, t = floor((n + c) / 2) + 1 shares open a
# secret: two sets of t sites then have an honest site in common, and it opens for one set of survivors.


MOST_SITES = 100
"""In one sum: every two sites share a mask."""


@dataclass(frozen=True)
class Parameters:
    """The numbers of secure aggregation that an experiment fixes.

    colluders: sites that may collude with the server, c. least: fewest values in a sum. quorum: fewest
    survivors for opening; 0: as many as t. honest: honest survivors that shared noise is sized for, m.
    """

    colluders: int = 0
    least: int = 2
    quorum: int = 0
    honest: int = 0

    def compute_threshold(self, sites: int) -> int:
        """Number of shares, t, that open a secret of one of this many sites."""
        return (sites + self.colluders) // 2 + 1

    def count_survivors_needed(self, sites: int) -> int:
        """Fewest survivors with which a roster of this many sites opens a sum."""
        return max(
            self.quorum, self.least, self.compute_threshold(sites), self.colluders + max(2, self.honest)
        )

    def check_roster(self, sites: int) -> None:
        """Raises PolicyRefusal when a roster of so many sites can never be opened safely, or is too large."""
        if sites > MOST_SITES:
            raise PolicyRefusal(
                f"secure: a roster of {sites} sites; allowed {MOST_SITES}, each of which shares a mask with "
                "each other one"
            )
        if sites < self.count_survivors_needed(sites):
            raise PolicyRefusal(
                f"secure: a roster of {sites} sites; with assumed_colluders {self.colluders}, least "
                f"{self.least} and quorum {self.quorum} a sum needs {self.count_survivors_needed(sites)}"
            )

    def check_survivors(self, sites: int, survivors: int) -> None:
        """Raises PolicyRefusal when so few of a roster's sites survive that nothing may be opened."""
        needed = self.count_survivors_needed(sites)
        if survivors < needed:
            raise PolicyRefusal(
                f"secure: {survivors} of {sites} sites sent masked values; a sum is opened from {needed} on"
            )


Trust = Callable[[str, str], None]
"""(site, identity key) -> None; raises PolicyRefusal when the site does not trust that key for that name."""


@dataclass(frozen=True)
class Attempt:
    """One try at one sum. number: grows over the whole run, so that no attempt comes twice.

    Mask keys and shares are made ahead for an attempt, before its sum is known.
    """

    run: str
    task: int
    number: int

    def bound(self, purpose: str, *more: str | int | bytes) -> bytes:
        """Bytes that bind a purpose to this attempt, to derive keys from and to sign."""
        return join_parts("perennial secure aggregation 1", purpose, self.run, self.task, self.number, *more)


@dataclass(frozen=True)
class Subject:
    """The subject of a sum: which values of a site are added up.

    statistic: update or evaluation. model: SHA-256 of the model that the values are about.
    """

    round: int
    statistic: str
    model: str


@dataclass(frozen=True)
class Peer:
    """A site as it introduces itself for a task.

    identity: the site's signing key, for its lifetime.
    cipher: its agreement key of the task, for what travels between sites.
    """

    name: str
    identity: str
    cipher: str
    signature: str

    @classmethod
    def introduce(cls, name: str, identity: bytes, cipher: bytes, run: str, task: int) -> "Peer":
        """A site's signed introduction. identity: its private signing key. cipher: private agreement key."""
        key = derive_agreement_key(cipher)
        signature = sign(identity, _encode_introduction(name, key, run, task))
        return cls(name, derive_signing_key(identity), key, signature)

    def check(self, run: str, task: int, trust: Trust) -> None:
        """Raises ProtocolError on a false signature, and whatever trust(name, identity) raises."""
        trust(self.name, self.identity)
        if not verify_signature(
            self.identity, _encode_introduction(self.name, self.cipher, run, task), self.signature
        ):
            raise ProtocolError(f"secure: the key of site {self.name!r} is not signed by its identity")


@dataclass(frozen=True)
class Member:
    """A peer in the roster of an attempt.

    mask: its fresh mask key for the attempt.
    commitment: hash of its self mask's seed, so that false shares of the seed are noticed.
    """

    name: str
    mask: str
    commitment: str
    signature: str

    @classmethod
    def sign(
        cls, attempt: Attempt, peers: bytes, name: str, mask: str, seed: bytes, identity: bytes
    ) -> "Member":
        """The signed membership of a site in the roster of an attempt.

        peers: peers_hash(). mask: its public mask key (hex). seed: 32 secret bytes of its self mask, of which
        the membership holds commit(seed) alone. identity: its private signing key.
        """
        commitment = commit(seed)
        content = attempt.bound("membership", peers, name, mask, commitment)
        return cls(name, mask, commitment, sign(identity, content))

    def check(self, attempt: Attempt, peers: bytes, peer: Peer) -> None:
        """Raises ProtocolError when this membership is not signed by `peer`. peers: peers_hash()."""
        content = attempt.bound("membership", peers, self.name, self.mask, self.commitment)
        if not verify_signature(peer.identity, content, self.signature):
            raise ProtocolError(f"secure: roster: the mask key of site {self.name!r} is not signed by it")


def commit(seed: bytes) -> str:
    """A hash that fixes a seed of 32 random bytes without revealing it."""
    return sha256(join_parts("seed", seed)).hexdigest()


def hash_peers(attempt: Attempt, peers: Sequence[Peer]) -> bytes:
    """SHA-256 of the attempt and of all its peers' names and keys, in their order."""
    said = [part for peer in peers for part in (peer.name, peer.identity, peer.cipher)]
    return sha256(attempt.bound("peers", *said)).digest()


def hash_roster(peers: bytes, subject: Subject, members: Sequence[Member]) -> bytes:
    """SHA-256 of the peers, of the members that send masked values, and of the sum's subject.

    Every pair mask, self mask and vote depends on it. peers: peers_hash().
    """
    said = [part for member in members for part in (member.name, member.mask, member.commitment)]
    about = (subject.round, subject.statistic, subject.model)
    return sha256(join_parts("roster", peers, *about, *said)).digest()


def check_order(names: Sequence[str], what: str) -> None:
    """Raises ProtocolError unless names ascend, each once. what: they are, for the error."""
    if list(names) != sorted(set(names)):
        raise ProtocolError(f"secure: {what}: names must ascend, each once")


def require(condition: bool, reason: str) -> None:
    """Raises PolicyRefusal with the reason unless the condition holds."""
    if not condition:
        raise PolicyRefusal(f"secure: {reason}")


def _encode_introduction(name: str, cipher: str, run: str, task: int) -> bytes:
    return join_parts("perennial secure introduction 1", run, task, name, cipher)
