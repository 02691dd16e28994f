"""A small federation of real ClientApps with data of their own, whose first site has a twin.

The server is the ServerApp in this process; every site has a site.yaml, approved what runs, and keeps a
ledger. `Federation.recorded()` runs it; `Federation.twin()` runs it again with other data at the first site,
whose answers are compared with the recorded ones, which the server gets.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from flwr.app import ArrayRecord, Context, Message, RecordDict

from perennial.client import site as client_site
from perennial.client.app import app as client_app
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import load_site_config
from perennial.engine.grid import InProcessGrid, build_site_contexts, set_task_identity
from perennial.foundation.record_key import record_key
from perennial.learning.site_method import SiteMethods
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.privacy.ledger_tip import read_ledger_number
from perennial.server.app import serve
from tests.approved import approve_installed
from tests.privacy.twins.coupling import coupled, drawn_as
from tests.privacy.twins.records import Records

OPEN: dict[str, Any] = {
    "answers": ["train", "evaluate", "measures", "digest", "sparsity", "statistics"],
}
"""A policy that refuses nothing by itself."""
KEPT = ("state", "outside")
"""Folders that a site keeps what it did in; the second one holds its ledger's tip."""


@dataclass(frozen=True)
class Answer:
    """What a site answered to one request.

    kind: of the request. request: its content. reply: the content, or None where Flower's error came back.
    charged: what the ledger was charged for it. log: what the site said in its log. state: a copy of the
    site's folder from before.
    """

    kind: str
    request: RecordDict
    reply: RecordDict | None
    error: str
    charged: tuple[Entry, ...]
    log: tuple[str, ...]
    state: Path | None = None


@dataclass
class Ran:
    """One run. answers: of the first site. files: what the operator's run folder holds, by name.

    others: each request to another site, and its reply or what it raised.
    """

    answers: list[Answer]
    files: dict[str, bytes]
    failed: str = ""
    others: list[tuple[RecordDict, Message | Exception]] = field(default_factory=list)


@dataclass
class Federation:
    """A server and its sites, each with data of its own.

    folder: for everything. settings: of the experiment, whose data are at the sites. policy: the first
    site's, beside OPEN. data: of every site by name; the first one has the twin.
    """

    folder: Path
    settings: Mapping[str, Any]
    data: Mapping[str, Records]
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The site that has a twin."""
        return next(iter(self.data))

    @property
    def file(self) -> Path:
        return self.folder / "experiment.yaml"

    def experiment(self) -> Experiment:
        """As it is run."""
        return load_experiment(self.file)

    def _lay_out(self) -> None:
        # which ledger counts which data is a part of what a site keeps
        os.environ["XDG_STATE_HOME"] = str(self.folder / self.first / "outside")
        set_task_identity()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(yaml.safe_dump(dict(self.settings)))
        for name, records in self.data.items():
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            own = records.write(folder)
            content: dict[str, Any] = {
                "site": name,
                "state_dir": "state",
                "ledger_tip": "outside/ledger.tip",
                "device": "cpu",
                "data": own,
                "policy": OPEN | dict(self.policy if name == self.first else {}),
            }
            (folder / "site.yaml").write_text(yaml.safe_dump(content))
            for kept in KEPT:
                shutil.rmtree(folder / kept, ignore_errors=True)
            with drawn_as(f"key of {name}"):
                # not when the first release happens to be made, which would shift what is drawn after it
                record_key(folder / "state")
                read_ledger_number(folder / "state")
            approve_installed(self.file, load_site_config(folder / "site.yaml").approvals)
        # what is imported draws from the secure source itself, the first time
        for name in ("client.handlers", "client.secure_answers", "client.site", "learning.private_training"):
            import_module(f"perennial.{name}")
        SiteMethods.of(self.experiment())
        import_module("opacus.grad_sample")

    def recorded(self, *, copies: bool = True) -> Ran:
        """Run it. copies: keep the first site's folder from before each message."""
        with coupled("server"):
            self._lay_out()
            return self._run(_Recorder(self, copies))

    def twin(self, records: Records, before: Ran) -> Ran:
        """Run it again with other data at the first site, whose server gets what was recorded."""
        with coupled("server"):
            self._lay_out()
            records.write(self.folder / self.first)
            return self._run(_Twin(self, before))

    def from_saved_state(self, records: Records, before: Ran) -> Ran:
        """Each recorded request again, at a site that has other data and the first copy's saved state."""
        answers = []
        with coupled("server"):
            self._lay_out()
            records.write(self.folder / self.first)
            for number, answer in enumerate(before.answers):
                assert answer.state is not None
                for kept in KEPT:
                    shutil.rmtree(self.folder / self.first / kept, ignore_errors=True)
                    shutil.copytree(answer.state / kept, self.folder / self.first / kept)
                message = Message(answer.request, 1, answer.kind)
                message.metadata.__dict__["_message_id"] = f"again-{number}"
                context = self._contexts(self._run_config())[1]
                answers.append(answered(self, message, context, number))
        return Ran(answers, {})

    def _run_config(self) -> dict[str, Any]:
        settings = RunSettings(
            str(self.file),
            name="run",
            runs=str(self.folder / "runs"),
            device="cpu",
            digest=self.experiment().digest,
        )
        return dict(vars(settings))

    def _contexts(self, run_config: dict[str, Any]) -> dict[int, Context]:
        contexts = build_site_contexts(len(self.data), run_config)
        for (node, context), name in zip(contexts.items(), self.data, strict=True):
            place: dict[str, Any] = {"site": str(self.folder / name / "site.yaml")}
            contexts[node] = Context(1, node, place, context.state, context.run_config)
        return contexts

    def _run(self, answer: "_Recorder") -> Ran:
        set_task_identity()
        run_config = self._run_config()
        runs = self.folder / "runs" / str(run_config["name"])
        shutil.rmtree(runs, ignore_errors=True)
        grid = InProcessGrid(answer, self._contexts(run_config))
        server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
        failed = ""
        try:
            with drawn_as("server 0"):
                serve(grid, server, engine="in-process")
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        files = {
            str(path.relative_to(runs)): path.read_bytes()
            for path in sorted(runs.rglob("*"))
            if path.is_file()
        }
        return Ran(answer.answers, files, failed, answer.others)


class _Recorder:
    """Answers as the sites do, and keeps what the first one was asked and said."""

    def __init__(self, federation: Federation, copies: bool = False) -> None:
        self.federation, self.copies = federation, copies
        self.answers: list[Answer] = []
        self.others: list[tuple[RecordDict, Message | Exception]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.dst_node_id == 1:
            return self.of_first(message, context)
        request = copied(message.content)
        reply = self.of_other(message, context)
        self.others.append((request, reply))
        if isinstance(reply, Exception):
            raise reply
        content = reply.content if reply.has_content() else None
        return _reply(content, "" if reply.has_content() else str(reply.error.reason), message)

    def of_other(self, message: Message, context: Context) -> Message | Exception:
        """Another site's reply, or what it raised."""
        with drawn_as(f"other {len(self.others) + 1}"):
            try:
                return client_app(message, context)
            except Exception as error:
                return error

    def of_first(self, message: Message, context: Context) -> Message:
        """The first site's reply."""
        number = len(self.answers)
        copy = None
        if self.copies:
            copy = self.federation.folder / "copies" / f"{number:04d}"
            shutil.rmtree(copy, ignore_errors=True)
            for kept in KEPT:
                held = self.federation.folder / self.federation.first / kept
                held.mkdir(exist_ok=True)
                shutil.copytree(held, copy / kept)
        found = answered(self.federation, message, context, number, copy)
        self.answers.append(found)
        return _reply(found.reply, found.error, message)


class _Twin(_Recorder):
    """Answers as the sites do, and keeps what the first one says now; the server gets what it said before."""

    def __init__(self, federation: Federation, before: Ran) -> None:
        super().__init__(federation)
        self.before = before

    def of_first(self, message: Message, context: Context) -> Message:
        number = len(self.answers)
        self.answers.append(answered(self.federation, message, context, number))
        if number >= len(self.before.answers):
            raise RuntimeError("the server asks the twin for more than it asked the first copy for")
        recorded = self.before.answers[number]
        return _reply(recorded.reply, recorded.error, message)

    def of_other(self, message: Message, context: Context) -> Message | Exception:
        """What the other site replied to the same request before."""
        number = len(self.others)
        if number >= len(self.before.others) or message.content != self.before.others[number][0]:
            raise RuntimeError("the server asks another site what it did not ask it before")
        return self.before.others[number][1]


def answered(
    federation: Federation,
    message: Message,
    context: Context,
    number: int,
    copy: Path | None = None,
) -> Answer:
    """Ask the first site. number: of the message, which decides all chance of the answer."""
    ledger = Ledger(federation.folder / federation.first / "state")
    before = len(ledger.read_entries()) if ledger.started else 0
    # the site reads its data anew: what it held of the copy before is no longer its own
    client_site._processes.clear()
    request = message.content
    with drawn_as(f"message {number}"), _listening() as said:
        reply = client_app(message, context)
    charged = ledger.read_entries()[before:] if ledger.started else ()
    content = copied(reply.content) if reply.has_content() else None
    error = "" if reply.has_content() else str(reply.error.reason)
    return Answer(message.metadata.message_type, request, content, error, charged, tuple(said), copy)


def _reply(content: RecordDict | None, error: str, message: Message) -> Message:
    if content is None:
        from flwr.app import Error

        return Message(Error(2, error), reply_to=message)
    return Message(copied(content), reply_to=message)


def copied(content: RecordDict) -> RecordDict:
    """A record whose tensors are its own."""
    from perennial.protocol.tensors import pack, unpack

    found = RecordDict()
    for name, part in content.items():
        if isinstance(part, ArrayRecord):
            tensors = unpack(part, name)
            found[name] = pack(type(tensors)({key: value.clone() for key, value in tensors.items()}))
        else:
            found[name] = part.copy()
    return found


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What is said in Perennial's logs in the block."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    ear, log = Ear(), logging.getLogger("perennial.site")
    level = log.level
    propagates, log.propagate = log.propagate, False
    log.addHandler(ear)
    log.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        log.removeHandler(ear)
        log.setLevel(level)
        log.propagate = propagates
