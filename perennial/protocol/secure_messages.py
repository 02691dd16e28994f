"""The messages of secure aggregation, in the order in which a sum needs them.

They are introductions, shares ahead of the sum, masked values, votes, and the opening.

Everything secret in them is masked, or sealed for one other site, but for the shares of an opening, which a
site gives out once for each attempt and of one kind for each site. docs/secure_aggregation.md says what the
server learns.
"""

from dataclasses import dataclass
from typing import Any

from perennial.foundation.names import SITE_NAME_RULE, is_site_name
from perennial.protocol.fields import bounded, hexadecimal, matching
from perennial.protocol.stamp import KEY, SHA256, SIGNATURE, Stamp
from perennial.protocol.tensors import Tensors

SHARE = 66
SEALED = 2 * (12 + SHARE + 16)
"""Hexadecimal digits of two shares of 33 bytes, sealed: nonce, content and tag of AES-256-GCM."""
MAX_ATTEMPT = 10**8 - 1
"""A site names files after an attempt's eight digits."""


def _names(**kwargs: object) -> Any:
    return matching(is_site_name, SITE_NAME_RULE, **kwargs)


@dataclass(frozen=True, kw_only=True)
class OfAttempt(Stamp):
    """Fields of every message about one attempt at a sum."""

    attempt: int = bounded(1, MAX_ATTEMPT)
    """Number of the attempt."""


@dataclass(frozen=True, kw_only=True)
class IntroduceRequest(Stamp):
    """Server to site: introduce yourself to the other sites of this task."""

    message_type = "query.introduce"


@dataclass(frozen=True, kw_only=True)
class IntroduceReply(Stamp):
    """Site to server: the public keys by which other sites know it."""

    message_type = "query.introduce"
    public = (
        "identity",
        "cipher",
        "signature",
    )
    identity: str = hexadecimal(KEY)
    """The site's signing key, for its lifetime; other sites may have pinned its fingerprint."""
    cipher: str = hexadecimal(KEY)
    """The site's agreement key of this task, for what sites send each other."""
    signature: str = hexadecimal(SIGNATURE)
    """Signature by the signing key, over site, run, task and agreement key."""


@dataclass(frozen=True, kw_only=True)
class ShareRequest(OfAttempt):
    """Server to site: make fresh masks for a coming attempt, and share them out among these peers.

    It is asked ahead, beside the opening of the attempt before.
    """

    message_type = "query.share"
    peers: list[str] = _names()
    """Every site that may take part in it, in ascending order."""
    peer_identities: list[str] = hexadecimal(KEY)
    """Their signing keys."""
    peer_ciphers: list[str] = hexadecimal(KEY)
    """Their agreement keys of this task."""
    peer_signatures: list[str] = hexadecimal(SIGNATURE)
    """Their signatures over these."""


@dataclass(frozen=True, kw_only=True)
class ShareReply(OfAttempt):
    """Site to server: a fresh public mask key, and shares sealed for other sites."""

    message_type = "query.share"
    public = (
        "attempt",
        "mask",
        "commitment",
        "signature",
        "receivers",
        "shares",
    )
    mask: str = hexadecimal(KEY)
    """The public mask key."""
    commitment: str = hexadecimal(SHA256)
    """A hash of the seed of the self mask."""
    signature: str = hexadecimal(SIGNATURE)
    """Signature by the site's signing key, over mask key, commitment, attempt and peers."""
    receivers: list[str] = _names()
    """Sites that the shares are for."""
    shares: list[str] = hexadecimal(SEALED)
    """For each receiver one share of the mask key and one of the seed, sealed so that nobody
    else can read them."""


@dataclass(frozen=True, kw_only=True)
class MaskedReply(OfAttempt):
    """Site to server: this site's values for one sum, as integers under masks.

    Without the other sites' values they are random numbers; with `secure.masks` false they are in the clear.
    """

    message_type = "train"
    public = (
        "attempt",
        "model",
    )
    words: Tensors
    """`words`: integers modulo 2^64. Of an update: the values on the public grid, then the site's weight. Of
    anything else: what the reply without masks has, one integer after the other."""
    model: str = hexadecimal(SHA256, default="")
    """At the end of a task, SHA-256 of the model that the site now keeps as the teacher."""


@dataclass(frozen=True, kw_only=True)
class VoteRequest(OfAttempt):
    """Server to site: these sites' masked values came; sign that you will open the sum of them only."""

    message_type = "query.vote"
    survivors: list[str] = _names()
    """Sites whose masked values are in the sum, in ascending order."""
    senders: list[str] = _names()
    """Sites that sealed shares for this one."""
    shares: list[str] = hexadecimal(SEALED)
    """The shares that each of them sealed."""


@dataclass(frozen=True, kw_only=True)
class VoteReply(OfAttempt):
    """Site to server: a signature over the survivors. A site signs one set for each attempt."""

    message_type = "query.vote"
    public = (
        "attempt",
        "signature",
    )
    signature: str = hexadecimal(SIGNATURE)
    """Signature over attempt, roster, model and survivors."""


@dataclass(frozen=True, kw_only=True)
class OpenRequest(OfAttempt):
    """Server to site: enough survivors signed; give out the shares that open the sum."""

    message_type = "query.open"
    survivors: list[str] = _names()
    """Sites whose masked values are in the sum."""
    voters: list[str] = _names()
    """Survivors that signed."""
    votes: list[str] = hexadecimal(SIGNATURE)
    """Their signatures over exactly these survivors."""


@dataclass(frozen=True, kw_only=True)
class OpenReply(OfAttempt):
    """Site to server: shares of the self masks of survivors, and of the mask keys of sites that are gone.

    For one site it gives a share of one kind, never of both. Shares of one attempt open no other attempt.
    """

    message_type = "query.open"
    public = (
        "attempt",
        "seeds_of",
        "seeds",
        "keys_of",
        "keys",
    )
    seeds_of: list[str] = _names()
    """Survivors."""
    seeds: list[str] = hexadecimal(SHARE)
    """This site's share of the seed of each one's self mask."""
    keys_of: list[str] = _names()
    """Sites of the roster whose masked values did not come."""
    keys: list[str] = hexadecimal(SHARE)
    """This site's share of each one's mask key of this attempt."""
