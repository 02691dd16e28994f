"""What a site signs of its closed-form sums, so that nobody need believe the operator.

A site's signing key is its own; its node key certifies it where it has one. Every statement names the list of
signers as it stood, which only grows, so that all contributions of a model name one list.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384

from perennial.foundation.names import is_site_name
from perennial.privacy.secure.keys import derive, derive_signing_key, join_parts, sign, verify_signature

NO_LIST = sha256(b"perennial signers 1").hexdigest()


@dataclass(frozen=True)
class Signer:
    """A site's public signing key. certified: its OpenSSH node key, a space and the node key's signature."""

    site: str
    key: str
    certified: str = ""

    @property
    def row(self) -> str:
        return f"{self.site} {self.key}"

    @property
    def node_key(self) -> str:
        """The OpenSSH node key that certifies this key; '' where none does."""
        public, _, signature = self.certified.rpartition(" ")
        try:
            key = serialization.load_ssh_public_key(public.encode())
            if isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(
                    bytes.fromhex(signature), _encode_certified(self.site, self.key), ec.ECDSA(SHA384())
                )
                return public
        except (InvalidSignature, ValueError, UnsupportedAlgorithm):
            pass
        return ""


def certify(node: ec.EllipticCurvePrivateKey, site: str, key: str) -> str:
    """The node key's certificate of its site's signing key, in the form of Signer.certified."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public = node.public_key().public_bytes(encoding, form).decode()
    return f"{public} {node.sign(_encode_certified(site, key), ec.ECDSA(SHA384())).hex()}"


def _encode_certified(site: str, key: str) -> bytes:
    return join_parts("perennial signing key 1", site, key)


def hash_lists(rows: Iterable[str]) -> list[str]:
    """Hash of the growing list of signers after each row: found[i] covers rows 0 to i."""
    found, last = [], NO_LIST
    for row in rows:
        last = sha256(join_parts("perennial signers 1", last, row)).hexdigest()
        found.append(last)
    return found


def _check_fields(cls: type, values: Any) -> dict[str, Any]:
    """A dataclass's fields from JSON. Raises ValueError when the values are none of these."""
    kinds = {field.name: field.type for field in fields(cls)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ValueError(f"found {values!r:.60}, expected {', '.join(kinds)}")
    found = dict(values)
    for name, kind in kinds.items():
        if kind in (str, int):
            fits = type(found[name]) is kind
        else:
            fits = isinstance(found[name], list | tuple) and all(type(part) is str for part in found[name])
            found[name] = tuple(found[name]) if fits else ()
        if not fits:
            raise ValueError(f"{name}: found {values[name]!r:.40}")
    return found


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A site's signed statement of its sums of one task. Hashes are SHA-256 in hexadecimal digits.

    settings: of the settings that turn sums into a model. task: whose classes are summed. features: hash of
    the maps. signers: hash of the list of signers. version: from 1.
    supersedes: hash of the version that this one replaces, '' for the first. sums: hash of the salt and the
    sums' own hash.
    """

    site: str
    key: str
    experiment: str
    settings: str
    run: str
    task: int
    class_order: str
    features: str
    signers: str
    version: int
    supersedes: str
    salt: str
    sums: str
    signature: str = ""

    @classmethod
    def make(
        cls,
        secret: bytes,
        known: Sequence["Statement"],
        sums: str,
        former: "Statement | None" = None,
        **said: Any,
    ) -> "Statement":
        """Sign a statement of these sums, or return a known one that says the same.

        secret: the site's private signing key. known: all its versions for this run and task, in order. sums:
        their SHA-256.
        former: the version to supersede; None: the latest. said: site, experiment, settings, run, task,
        class_order, features, signers.
        """
        latest = known[-1] if known else None
        said |= {"key": derive_signing_key(secret)}
        for each in known if former is not None else known[-1:]:
            fits = former is None or each.supersedes == former.sha256
            if fits and each.is_of(sums) and said.items() <= asdict(each).items():
                return each
        former = former or latest
        version = 1 if latest is None else latest.version + 1
        supersedes = "" if former is None else former.sha256
        salt = derive(
            secret, join_parts("perennial salt 1", said["run"], said["task"], version, supersedes)
        ).hex()
        unsigned = cls(
            **said, version=version, supersedes=supersedes, salt=salt, sums=_hash_salted(salt, sums)
        )
        return replace(unsigned, signature=sign(secret, unsigned.content))

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The statement with these fields. Raises ValueError when they are not a statement's."""
        return cls(**_check_fields(cls, values))

    @property
    def content(self) -> bytes:
        values = {**asdict(self), "signature": ""}
        return join_parts("perennial statement of sums 2", *values.values())

    @property
    def sha256(self) -> str:
        return sha256(self.content).hexdigest()

    @property
    def signed(self) -> bool:
        """Whether the site's name is a valid one, and the statement's own key signed it."""
        return is_site_name(self.site) and verify_signature(self.key, self.content, self.signature)

    def is_of(self, sums: str) -> bool:
        """Whether the statement is about the sums with this SHA-256."""
        return self.sums == _hash_salted(self.salt, sums)


def _hash_salted(salt: str, sums: str) -> str:
    return sha256(join_parts("perennial salted sums 1", salt, sums)).hexdigest()


def is_allowed(signer: Signer, brought: Mapping[str, Sequence[str]]) -> bool:
    """Whether the verifier's keys have the site's signing key, or a node key that certifies it.

    brought: site -> keys, as read_keys() gives.
    """
    keys = brought.get(signer.site, ())
    return signer.key in keys or (signer.node_key != "" and signer.node_key in keys)
