"""Certificates of closed-form models: the signed statements of their sums, and what follows from these alone.

An operator numbers, chains and signs them. What this file checks needs no sums: a site does it too.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from perennial.foundation.block import Block
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.plain import PlainObject
from perennial.privacy.secure.keys import joined, sign, signing_key, verified
from perennial.privacy.signed_sums import Signer, Statement, Withdrawal, allowed_by, lists

FOLDER = "certificates"
"""Of a run."""
OPERATOR = "operator"
"""Name of the operator's key in a list of keys."""
Kind = Literal["run", "version", "withdraw", "withdraw records", "merge"]


class Values(Block):
    """A float32 tensor. base64: of its little-endian bytes."""

    shape: list[int]
    base64: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        data = tensor.cpu().contiguous().numpy().astype("<f4").tobytes()
        return cls(shape=list(tensor.shape), base64=base64.b64encode(data).decode())

    @property
    def tensor(self) -> Tensor:
        """The float32 tensor. Raises ValueError when the bytes do not fit the shape."""
        found = np.frombuffer(base64.b64decode(self.base64, validate=True), dtype="<f4")
        return torch.from_numpy(found.astype(np.float32).reshape(self.shape))


class Run(Block):
    """A run whose sums a model is made of.

    experiments: digests under which it was carried out; that of `settings` is the last.
    signers: site, signing key, and what the node key says of it.
    """

    run: str
    experiments: list[str]
    settings: PlainObject
    signers: list[tuple[str, str, str]]

    @property
    def keys(self) -> list[Signer]:
        return [Signer(*row) for row in self.signers]


class Certificate(Block):
    """An operator's signed certificate of a closed-form model: what the model follows from.

    number, previous: place in the operator's chain, and the hash of the certificate before. about: the site
    whose sums were withdrawn, or the version. classes: in the order of the model; the head may know the first
    of them only.
    says: what nobody but the operator vouches for. operator: public key.
    """

    kind: Kind
    number: int
    previous: str
    time: str
    about: str
    runs: list[Run]
    features: str
    classes: list[str]
    statements: list[PlainObject]
    withdrawn: list[PlainObject]
    shrinkage: float
    head: dict[str, Values]
    says: PlainObject
    operator: str = ""
    signature: str = ""

    @property
    def content(self) -> bytes:
        values = self.model_dump(exclude={"signature"})
        return joined("perennial certificate 1", json.dumps(values, sort_keys=True))

    @property
    def sha256(self) -> str:
        return sha256(joined(self.content, self.signature)).hexdigest()

    def signed_by(self, secret: bytes) -> Self:
        """This certificate with the operator's key and signature. secret: the operator's private key."""
        found = self.model_copy(update={"operator": signing_key(secret), "signature": ""})
        return found.model_copy(update={"signature": sign(secret, found.content)})

    @property
    def of_sites(self) -> list[Statement]:
        return [Statement.from_json(values) for values in self.statements]

    @property
    def receipts(self) -> list[Withdrawal]:
        return [Withdrawal.from_json(values) for values in self.withdrawn]

    @property
    def gone(self) -> dict[str, Withdrawal]:
        """The receipts of sites that were withdrawn as a whole, by site."""
        return {receipt.site: receipt for receipt in self.receipts if not receipt.remaining}

    @property
    def superseded(self) -> set[str]:
        """Hashes of the statements that receipts have withdrawn."""
        return {old for receipt in self.receipts for old in receipt.withdrawn}


def read_certificate(path: Path) -> Certificate:
    """The certificate in a JSON file. Raises StateError naming the file when it is none."""
    try:
        return Certificate.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise StateError(f"{path}: no certificate ({str(error)!r:.200})") from error


def issue(folder: Path, secret: bytes, **said: Any) -> Path:
    """Sign and write a run's next certificate; returns its path, or that of the last one if equal.

    folder: of the run. secret: the operator's private key. said: fields of Certificate.
    """
    known, paths = [read_certificate(path) for path in paths_of(folder)], paths_of(folder)
    certificate = Certificate(
        number=1 + (known[-1].number if known else 0),
        previous=known[-1].sha256 if known else "",
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        **said,
    ).signed_by(secret)
    own = {"number", "previous", "time", "says", "signature"}
    if known and known[-1].model_dump(exclude=own) == certificate.model_dump(exclude=own):
        return paths[-1]
    make_folder(folder / FOLDER, mode=0o755)
    name = "-".join([f"{certificate.number:04d}", *certificate.kind.split(), *certificate.about.split()])
    path = folder / FOLDER / f"{name}.json"
    replace_file(path, (certificate.model_dump_json(indent=1) + "\n").encode(), mode=0o644)
    return path


def paths_of(folder: Path) -> list[Path]:
    """The certificates in a run's folder, in their order."""
    return sorted((folder / FOLDER).glob("[0-9]*.json"))


def read_keys(path: Path) -> dict[str, list[str]]:
    """Keys that a verifier brings, from a file: name of a site, or `operator` -> keys.

    A line is a name and a signing key in hexadecimal digits, or a node key as an OpenSSH line with the site
    as its comment.
    Raises ConfigError naming the line that is neither.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.strip().split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) >= 3 and parts[0].startswith("ecdsa-"):
            found.setdefault(" ".join(parts[2:]), []).append(" ".join(parts[:2]))
        elif len(parts) >= 2 and len(parts[-1]) == 64 and set(parts[-1]) <= set("0123456789abcdef"):
            found.setdefault(" ".join(parts[:-1]), []).append(parts[-1])
        else:
            raise ConfigError(
                f"{path}: line {number}: found {line!r:.40}; allowed `NAME KEY` with a key of 64 hexadecimal "
                "digits, or `ecdsa-sha2-nistp384 KEY NAME`"
            )
    return found


def require_sound(found: Certificate, brought: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raises StateError naming what does not hold: signatures, lists of keys, versions, runs, withdrawals.

    brought: keys that the verifier knows; None: there are none.
    """
    try:
        statements, receipts = found.of_sites, found.receipts
        tensors = {name: values.tensor for name, values in found.head.items()}
    except ValueError as error:
        raise StateError(f"certificate: {error}") from error
    if tensors.keys() != {"head.weight", "head.bias"}:
        raise StateError("certificate: head: expected head.weight and head.bias")
    _require(
        verified(found.operator, found.content, found.signature), "signature: not the operator's of this"
    )
    if brought is not None and OPERATOR in brought:
        _require(found.operator in brought[OPERATOR], "operator: not the key in the list that was brought")
    runs = {run.run: run for run in found.runs}
    _require(len(runs) == len(found.runs) > 0, "runs: each once, and one at least")
    for statement in statements:
        _require_statement(statement, runs, found, brought)
    _require(len(statements) > 0, "statements: none, and a model of nothing is none")
    _once(((s.site, s.run, s.task) for s in statements), "sums of {0} in task {2} count twice")
    versions = ((s.key, s.run, s.task, s.version) for s in statements)
    _once(versions, "key {0:.16} signed two statements of version {3} of task {2}")
    dead = found.superseded | {statement.supersedes for statement in statements}
    for statement in statements:
        _require(statement.sha256 not in dead, f"statement of {statement.site}: superseded by a later one")
    for receipt in receipts:
        _require(receipt.signed, f"withdrawal of {receipt.site}: a signature is not its signer's")
        _require(receipt.operator == found.operator, f"withdrawal of {receipt.site}: of another operator")
        _require(receipt.run in runs and receipt.withdrawn, f"withdrawal of {receipt.site}: of nothing here")
        if receipt.key:
            known = {(signer.site, signer.key) for run in found.runs for signer in run.keys}
            _require((receipt.site, receipt.key) in known, f"withdrawal of {receipt.site}: by no signer")
    keys_gone = {s.key for run in found.runs for s in run.keys if s.site in found.gone}
    for statement in statements:
        alive = statement.site not in found.gone and statement.key not in keys_gone
        _require(alive, f"statement of {statement.site}: the site was withdrawn")
    if found.kind in ("withdraw", "withdraw records"):
        whole = found.kind == "withdraw"
        of_this = [r for r in receipts if r.site == found.about and (not r.remaining) == whole]
        _require(of_this, "withdrawn: no receipt of this withdrawal; nothing was withdrawn")
        there = {statement.sha256 for statement in statements} | found.superseded
        _require(set(of_this[-1].remaining) <= there, "withdrawn: what should remain is not there")


def _require_statement(
    statement: Statement,
    runs: Mapping[str, Run],
    found: Certificate,
    brought: Mapping[str, Sequence[str]] | None,
) -> None:
    who = f"statement of {statement.site}, task {statement.task}"
    run = runs.get(statement.run)
    if run is None:
        raise StateError(f"certificate: {who}: of run {statement.run:.16}, which is not the certificate's")
    _require(statement.experiment in run.experiments, f"{who}: of another experiment")
    _require(statement.features == found.features, f"{who}: of other feature maps")
    orders = {sha256(",".join(found.classes[:n]).encode()).hexdigest() for n in range(len(found.classes) + 1)}
    _require(statement.class_order in orders, f"{who}: of another order of classes")
    signer = next((s for s in run.keys if (s.site, s.key) == (statement.site, statement.key)), None)
    if signer is None:
        raise StateError(f"certificate: {who}: its key is not in the list of signers")
    _require(statement.signers in lists(s.row for s in run.keys), f"{who}: names another list of signers")
    _require(statement.signed, f"{who}: its signature is not of this key")
    if brought is not None:
        _require(allowed_by(signer, brought), f"{who}: its key is not in the list that was brought")


def require_chain(chain: Sequence[Certificate]) -> None:
    """Raises StateError when a certificate does not follow the one before it, or undoes its withdrawals."""
    for before, after in pairwise(chain):
        follows = (after.number, after.previous) == (before.number + 1, before.sha256)
        _require(follows, f"number {after.number}: does not follow the one before")
        _require(after.operator == before.operator, f"number {after.number}: of another operator")
        _require(after.superseded >= before.superseded, f"number {after.number}: takes withdrawals back")


def _require(holds: object, why: str) -> None:
    if not holds:
        raise StateError(f"certificate: {why}")


def _once(rows: Iterable[tuple[Any, ...]], why: str) -> None:
    for row, times in Counter(rows).items():
        _require(times == 1, why.format(*row))
