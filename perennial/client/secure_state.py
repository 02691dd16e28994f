"""What a site keeps on its disk for secure aggregation.

Each file is written before the answer that it is about leaves.

In state_dir/secure, for the site's lifetime: its signing key, and a list of the values that it masked and
opened, each with its run, since a second run of the same experiment would begin with the same model. In the
run's folder: the agreement key of the task, the signing keys under which peers were met, one file for each
attempt, and the masked values that were sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from perennial.client.identity import Identity
from perennial.client.state import Quota
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.foundation.files import lock_folder, make_folder, replace_file
from perennial.foundation.plain import Plain
from perennial.privacy.secure.keys import (
    Words,
    derive_signing_key,
    draw_secret,
    format_fingerprint,
    join_parts,
)
from perennial.privacy.secure.roster import Attempt, require
from perennial.privacy.secure.site_session import STAGES, SiteSession
from perennial.privacy.signed_sums import Signer

IDENTITY = "identity.key"
OPENED = "opened.json"
MASKED = "masked"
LAST, GIVEN_UP = "last attempt", "given up"
"""A run's row in OPENED: LAST, in the place of a statistic; the run; its newest attempt, or GIVEN_UP."""
Uses = Mapping[tuple[str, str], str]
CERTIFIED = Path("secure/identity.certified")
"""In state_dir: what the node key says of the signing key; `perennial site start` writes it."""


def own_identity(state_dir: Path) -> bytes:
    """The site's private signing key, made at the first call. Raises StateError when it is damaged."""
    path = state_dir / "secure" / IDENTITY
    if not path.exists():
        make_folder(path.parent)
        replace_file(path, draw_secret())
    key = path.read_bytes()
    if len(key) != 32:
        raise StateError(f"{path}: found {len(key)} bytes, allowed the 32 of a signing key; restore it")
    return key


class SecureState:
    """Durable state of one site in one run.

    folder: the run's, under the site's state_dir. quota: what the run's folder may hold; None: anything.
    """

    def __init__(
        self, state_dir: Path, run: str, site: str, policy: SitePolicy, quota: Quota | None = None
    ) -> None:
        self.site, self._policy, self._state_dir, self._quota = site, policy, state_dir, quota
        self.folder = state_dir / "runs" / run / "secure"
        make_folder(self.folder)
        make_folder(state_dir / "secure")
        self._met: dict[str, str] | None = None

    def lock_attempts(self) -> AbstractContextManager[None]:
        """Context manager for reading an attempt and writing it back, one request at a time."""
        return lock_folder(self.folder)

    @property
    def identity(self) -> bytes:
        return own_identity(self._state_dir)

    def load_cipher(self, task: int, *, make: bool = False) -> bytes:
        """The private agreement key of a task.

        make: draw the key when there is none yet.
        Raises PolicyRefusal when this site has not introduced itself for the task.
        """
        path = self.folder / f"task-{task:05d}.key"
        if not path.exists():
            require(make, f"this site has not introduced itself for task {task}")
            replace_file(path, draw_secret())
            for old in self.folder.glob("task-*.key"):
                if old < path:
                    old.unlink()
        return path.read_bytes()

    # who the peers are

    def trust(self, name: str, identity: str) -> None:
        """Check a peer's signing key, and note one that is met for the first time.

        Raises PolicyRefusal when the site has pinned another key for the peer, pins peers and not this one,
        or met it under another key in this run.
        """
        found, pinned = format_fingerprint(identity), self._policy.peers
        if pinned:
            allowed = pinned.get(name)
            own = name == self.site and identity == derive_signing_key(self.identity)
            if not own and allowed != found:
                raise PolicyRefusal(
                    f"policy.peers: site {name!r} came with key {found}; pinned: {allowed or 'none'}"
                )
            return
        met: dict[str, str] = self._read("peers", {}) if self._met is None else self._met
        self._met = met
        if met.setdefault(name, identity) != identity:
            raise PolicyRefusal(
                f"secure: site {name!r} came with key {found}; first met with {format_fingerprint(met[name])}"
            )

    def keep_peers(self) -> None:
        """Store the keys of peers that trust() met for the first time."""
        if self._met is not None and self._met != self._read("peers", {}):
            self._write("peers", self._met)

    # attempts

    def load_session(self, number: int) -> SiteSession | None:
        """This site's session for an attempt; None if it has not begun the attempt."""
        values = self._read(f"attempt-{number:08d}", None)
        return None if values is None else SiteSession.from_json(values)

    def keep(self, session: SiteSession) -> None:
        """Write an attempt to the disk, inside one_at_a_time().

        One with masked values ends all earlier attempts: this site helps to open none of them any more.
        Raises StateError where the disk knows a later stage: an attempt never goes back.
        """
        number = session.attempt.number
        before = self.load_session(number)
        if before is not None and STAGES.index(before.stage) > STAGES.index(session.stage):
            raise StateError(
                f"{self.folder}: attempt {number} is {before.stage}; it does not become {session.stage} again"
            )
        self._write(f"attempt-{number:08d}", session.to_json())
        if session.stage != "prepared":
            for path in (*self.folder.glob("attempt-*.json"), *self.folder.glob("sent-*.bin")):
                if int(path.stem.split("-")[1]) < number:
                    path.unlink(missing_ok=True)

    def check_new(self, number: int) -> None:
        """Raises PolicyRefusal unless attempt `number` is newer than the last one with masked values."""
        last = max((int(path.stem.split("-")[1]) for path in self.folder.glob("sent-*.bin")), default=0)
        require(number > last, f"attempt {number} is over; this site has taken part in {last}")

    def has_sent(self, number: int) -> bool:
        """Whether masked values of attempt `number` are on the disk."""
        return (self.folder / f"sent-{number:08d}.bin").exists()

    def keep_sent(self, number: int, words: Words) -> None:
        """Store the masked values of attempt `number` before they leave, so that they can leave again."""
        data = words.dtype.str.encode() + words.tobytes()
        self._make_room(len(data))
        replace_file(self.folder / f"sent-{number:08d}.bin", data)

    def read_sent(self, number: int) -> Words:
        """The masked values of an attempt, (N,), as keep_sent() stored them."""
        data = (self.folder / f"sent-{number:08d}.bin").read_bytes()
        return np.frombuffer(data, dtype=np.dtype(data[:3].decode()), offset=3)

    # which sum a value is in

    def check_closed(
        self, attempt: Attempt, statistic: str, closes: Sequence[str], sites: Sequence[str]
    ) -> None:
        """Raises PolicyRefusal if this site's value about one of closes is in another sum.

        That is, it was opened in one, or another run masked it: other sites can open that run's sum
        without this one's help, and nobody tells this site. Attempts of one run follow one another at every
        site, so that a new one may take the value of those that it ends. One over the very sites of an opened
        sum may follow too, since the server cannot use a sum that one site spoilt; a sum over other sites,
        less that one, could be the value of a single site.
        closes: what the value tells of, such as a model's SHA-256. sites: of the roster, or of the sum.
        """
        uses = _read_uses(self._state_dir)
        last = uses.get((LAST, attempt.run), "0")
        require(last != GIVEN_UP, f"this site gave run {attempt.run} up, and takes part in no sum of it")
        require(
            attempt.number >= int(last),
            f"attempt {attempt.number} is over; this site has taken part in {last}",
        )
        own = (None, f"{attempt.run} {MASKED}", _name_sum(attempt, sites))
        for about in closes:
            by = uses.get((statistic, about))
            run, _, how = (by or "").partition(" ")
            what = (
                f"is masked in run {run}, whose sum may be opened" if how == MASKED else "was opened in a sum"
            )
            require(by in own, f"this site's {statistic} for {about:.12} {what}; it goes into no other one")

    def note_masked(
        self, attempt: Attempt, statistic: str, closes: Sequence[str], sites: Sequence[str]
    ) -> None:
        """Record, before masked values leave, that they are this run's. sites, errors: as in check_closed().

        What was opened stays so.
        """
        self._note(attempt, statistic, closes, sites, opened=False)

    def note_opened(
        self, attempt: Attempt, statistic: str, closes: Sequence[str], sites: Sequence[str]
    ) -> None:
        """Record, before the shares leave, over which sites the value about each of closes is opened.

        Raises PolicyRefusal as check_closed() does.
        """
        self._note(attempt, statistic, closes, sites, opened=True)

    def _note(
        self, attempt: Attempt, statistic: str, closes: Sequence[str], sites: Sequence[str], *, opened: bool
    ) -> None:
        # runs have a process each here
        with lock_folder(self._state_dir / "secure"):
            self.check_closed(attempt, statistic, closes, sites)
            uses = _read_uses(self._state_dir)
            rows, masked = [(statistic, about) for about in closes], f"{attempt.run} {MASKED}"
            new = {row: _name_sum(attempt, sites) if opened else uses.get(row, masked) for row in rows}
            # the run's folder, which knows its attempts too, can be cleaned
            last = {(LAST, attempt.run): str(attempt.number)}
            _write_uses(self._state_dir, uses, uses | new | last)

    def _read(self, name: str, default: Plain) -> Plain:
        path = self.folder / f"{name}.json"
        if not path.exists():
            return default
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise StateError(f"{path}: damaged ({error})") from error

    def _write(self, name: str, value: Mapping[str, Any] | list[Any] | int) -> None:
        data = json.dumps(value).encode()
        self._make_room(len(data))
        replace_file(self.folder / f"{name}.json", data)

    def _make_room(self, coming: int) -> None:
        if self._quota is not None:
            self._quota.require(self.folder.parent, coming)


def _name_sum(attempt: Attempt, sites: Sequence[str]) -> str:
    return f"{attempt.run} {sha256(join_parts(*sorted(sites))).hexdigest()}"


def give_up(state_dir: Path, run: str) -> None:
    """Take part in no further sum of a run, whose folder was removed, and free the values that it masked.

    They may go into sums of other runs, but for those that this site helped to open. That is safe once every
    site of the run has done so: then nobody can open its sums any more.
    """
    make_folder(state_dir / "secure")
    with lock_folder(state_dir / "secure"):
        uses = _read_uses(state_dir)
        kept = {key: by for key, by in uses.items() if by != f"{run} {MASKED}"}
        _write_uses(state_dir, uses, kept | {(LAST, run): GIVEN_UP})


def _read_uses(state_dir: Path) -> dict[tuple[str, str], str]:
    """(statistic, about) -> "RUN SHA256", of the sites in whose sum it was opened, or "RUN masked".

    (LAST, run) -> the number of the newest attempt in which this site masked values, or GIVEN_UP.
    """
    path = state_dir / "secure" / OPENED
    try:
        rows = json.loads(path.read_bytes()) if path.exists() else []
        # rows of an earlier version do not name their run, and so are of another one
        return {(row[0], row[1]): row[2] if len(row) > 2 else "" for row in rows}
    except (ValueError, LookupError, TypeError) as error:
        raise StateError(f"{path}: damaged ({error}); restore it from a copy") from error


def _write_uses(state_dir: Path, old: Uses, new: Uses) -> None:
    if new != old:
        replace_file(
            state_dir / "secure" / OPENED, json.dumps([[*of, by] for of, by in new.items()]).encode()
        )


def own_key(state_dir: Path) -> str:
    """The site's public signing key; the key pair is made at the first call."""
    return derive_signing_key(own_identity(state_dir))


def certify_own_key(state_dir: Path, certified: Callable[[str], str]) -> None:
    """Store the node key's certificate of the signing key. certified: makes it from the public key."""
    own = certified(own_key(state_dir))
    replace_file(state_dir / CERTIFIED, own.encode(), mode=0o644)


def own_signer(identity: Identity) -> Signer:
    """The site's public signing key, with the node key's certificate of it, '' if there is none yet."""
    path, key = identity.state_dir / CERTIFIED, own_key(identity.state_dir)
    return Signer(identity.name, key, path.read_text() if path.exists() else "")
