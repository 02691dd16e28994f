"""The server's record of masked sums on disk, so that a killed run goes on in the phase it was in.

Four things: the number of the last attempt, the sum in progress, the sites of sums that were of no use, and
the last opened sums, which a run that goes back to an older checkpoint takes without asking the sites again;
they would refuse.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.privacy.secure.keys import Words
from perennial.privacy.secure.roster import Subject
from perennial.privacy.secure.server_session import ServerSession

KEPT = 4
"""Opened sums that are kept at least: those of the last rounds and of a task's end."""


@dataclass(frozen=True)
class Opened:
    """An opened sum. words: (N,) without masks. survivors: sites in it. roster: sites of the attempt."""

    words: Words = field(repr=False)
    survivors: tuple[str, ...]
    roster: tuple[str, ...]
    models: tuple[str, ...] = ()
    """Hashes of the models that the survivors keep; at the end of a task."""
    attempt: int = 0


class SumStore:
    """Keeps the progress of masked sums on disk.

    folder: of this run; None: nothing is kept, and a stopped run starts its round anew.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "secure"
        if self._folder is not None:
            make_folder(self._folder)
        self._number = self._read("number", 0)

    def keep_token(self, drawn: str) -> str:
        """The run's token: `drawn`, which is stored, unless an earlier one is stored already.

        That happens when a run was stopped before its first checkpoint and starts over: sites go on with the
        sum that was begun, and make no other one.
        """
        kept = self._read("run", None)
        if kept is None:
            self._write("run", drawn)
        return kept or drawn

    def issue_number(self) -> int:
        """A new attempt's number, which no attempt of this run has had."""
        self._number += 1
        self._write("number", self._number)
        return self._number

    def keep(self, session: ServerSession, *, total: bool = False) -> None:
        """Store the sum in progress. total: with the sum of masked values, which no longer changes."""
        if self._folder is not None:
            if total and session.total is not None:
                _write_words(self._folder / "total.bin", session.total)
            self._write("session", session.to_json())

    def find_session(self, subject: Subject) -> ServerSession | None:
        """The stored sum in progress, if it is about this model and statistic; else None."""
        values = self._read_session()
        if values is None or self._folder is None:
            return None
        session = ServerSession.from_json(values, None)
        if (session.subject.statistic, session.subject.model) != (subject.statistic, subject.model):
            return None
        if session.closed:
            session.total = _read_words(self._folder / "total.bin")
        return session

    @property
    def pending(self) -> Subject | None:
        """The sum whose opening sites were asked for without success; None if there is none."""
        values = self._read_session()
        if values is None or not values["opening"]:
            return None
        subject = Subject(**values["subject"])
        done = [found.attempt for found in self.list_opened(subject.statistic, subject.model)]
        return None if values["attempt"]["number"] in done else subject

    def keep_opened(self, subject: Subject, opened: Opened) -> None:
        """Store an opened sum, and delete those that are too old to be asked for again."""
        if self._folder is None:
            return
        name = f"opened-{opened.attempt:08d}"
        _write_words(self._folder / f"{name}.bin", opened.words)
        facts = {
            "statistic": subject.statistic,
            "model": subject.model,
            "survivors": opened.survivors,
            "roster": opened.roster,
            "models": opened.models,
            "attempt": opened.attempt,
            "round": subject.round,
        }
        self._write(name, facts)
        for path in sorted(self._folder.glob("opened-*.json"))[:-KEPT]:
            # a checkpoint is at most one round old
            if json.loads(path.read_bytes())["round"] < subject.round - 1:
                path.unlink()
                path.with_suffix(".bin").unlink(missing_ok=True)

    def keep_refused(self, subject: Subject, session: ServerSession) -> None:
        """Store that this attempt's sum is of no use, in place of the sum; it is no more in progress."""
        facts = {"statistic": subject.statistic, "model": subject.model, "sites": session.survivors}
        self._write(_name_refused(session.attempt.number), facts)

    def list_refused(self, statistic: str, model: str) -> list[frozenset[str]]:
        """The sites of each sum of a statistic about a model that was of no use."""
        paths = [] if self._folder is None else sorted(self._folder.glob("refused-*.json"))
        kept = [json.loads(path.read_bytes()) for path in paths]
        about = statistic, model
        return [frozenset(facts["sites"]) for facts in kept if (facts["statistic"], facts["model"]) == about]

    def list_opened(self, statistic: str, model: str) -> list[Opened]:
        """The stored opened sums of a statistic about a model, oldest first; no site is in two of them."""
        found = []
        for path in [] if self._folder is None else sorted(self._folder.glob("opened-*.json")):
            facts = json.loads(path.read_bytes())
            if (facts["statistic"], facts["model"]) == (statistic, model):
                words = _read_words(path.with_suffix(".bin"))
                names = (tuple(facts[key]) for key in ("survivors", "roster", "models"))
                found.append(Opened(words, *names, attempt=facts["attempt"]))
        return found

    def _read_session(self) -> Any:
        values = self._read("session", None)
        over = values is not None and self._read(_name_refused(values["attempt"]["number"]), None)
        return None if over else values

    def _read(self, name: str, default: Any) -> Any:
        path = None if self._folder is None else self._folder / f"{name}.json"
        if path is None or not path.exists():
            return default
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise StateError(f"{path}: damaged ({error})") from error

    def _write(self, name: str, value: Any) -> None:
        if self._folder is not None:
            replace_file(self._folder / f"{name}.json", json.dumps(value).encode())


def _name_refused(number: int) -> str:
    return f"refused-{number:08d}"


def _write_words(path: Path, words: Words) -> None:
    replace_file(path, words.dtype.str.encode() + words.tobytes())


def _read_words(path: Path) -> Words:
    data = path.read_bytes()
    return np.frombuffer(data, dtype=np.dtype(data[:3].decode()), offset=3)
