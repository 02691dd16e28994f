"""A federation in one process whose sites can be switched off and on while a run goes on."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, Error, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts, set_task_identity
from perennial.server.app import serve

EXPERIMENT: dict[str, Any] = {
    "name": "switched",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "evaluation": {"every": "round"},
}
UNREACHABLE = 203
"""Flower's code of an error that the SuperLink makes in place of a site (NODE_UNAVAILABLE)."""


class SwitchedGrid(InProcessGrid):
    """Sites answer after `delay` seconds. off: node ids of those that are away.

    lingering: whether a site that is away still counts as connected, as until its heartbeats are missed; the
    SuperLink then answers for it, as source 1.
    """

    def __init__(self, run_config: dict[str, Any], sites: int = 3) -> None:
        super().__init__(client_app, build_site_contexts(sites, run_config))
        self.off: set[int] = set()
        self.delay = 0.0
        self.lingering = False

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self._contexts if self.lingering or node not in self.off]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if not self._queue:
            return []
        message = self._queue[0]  # no cohorts here, so each is answered by itself
        if message.metadata.dst_node_id in self.off:
            if not self.lingering:
                self._queue.rotate(-1)
                return []
            self._queue.popleft()
            reply = Message(Error(UNREACHABLE, "node unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return [reply]
        if message.metadata.message_type == "train":
            time.sleep(self.delay)
        return super().pull_messages(message_ids)


class SwitchedRun:
    """One run of EXPERIMENT in a thread. error: what ended it, where something did."""

    def __init__(self, folder: Path, engine: str = "in-process", **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._engine = engine
        self._file = folder / "experiment.yaml"
        self._file.write_text(yaml.safe_dump(EXPERIMENT | changes))
        self.folder = folder / "operator" / "state" / "runs" / "switched"
        self.error: BaseException | None = None
        self.summary: dict[str, Any] = {}
        self.listener: Callable[[dict[str, Any]], None] | None = None
        self.grid = self._grid("")

    def _grid(self, resume: str) -> SwitchedGrid:
        settings = RunSettings(str(self._file), runs=str(self.folder.parent), resume=resume)
        self._config = dict(vars(settings))
        return SwitchedGrid(self._config)

    def start(self, resume: str = "") -> threading.Thread:
        """Start, or go on with resume="yes"."""
        if resume:
            before, self.grid = self.grid, self._grid(resume)
            self.grid.delay = before.delay
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def finish(self, resume: str = "") -> dict[str, Any]:
        """Run to the end; the summary."""
        thread = self.start(resume)
        thread.join(120)
        if self.error is not None:
            raise self.error
        return self.summary

    def _run(self) -> None:
        set_task_identity()
        self.error = None
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=self._config)
        try:
            self.summary = serve(self.grid, context, self._engine, self.listener)
        except BaseException as error:
            self.error = error

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The journal's events of one kind so far."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["event"] == kind]
