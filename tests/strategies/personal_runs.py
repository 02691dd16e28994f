"""A small experiment with personal layers, run in this process with an ear on the wire."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file
from torch import Tensor

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.config.simulation import list_simulated_sites
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.models.saved import find_model_file
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import TrainReply
from perennial.server.app import serve

STRATEGY = {
    "name": "clustered_personalisation",
    "base": "fedavg",
    "global_rounds": 1,
    "clusters": 2,
    "channels": 8,
    "layers": 1,
}
EXPERIMENT = {
    "name": "fedperc",
    "seed": 2,
    "data": {"source": "digits", "sites": 4, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "batch_size": 16},
    "strategy": STRATEGY,
}
GROUPS = {"grouping": "fixed", "groups": [["site-0", "site-1"], ["site-2", "site-3"]]}
Change = Callable[[str, TrainReply], TrainReply]


@dataclass
class Run:
    """A finished run. asked, sent: every message to a site and from one, in order."""

    folder: Path
    summary: dict[str, Any]
    asked: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)

    def cluster(self, number: int) -> dict[str, Tensor]:
        """The cluster's shared layers as the server holds them."""
        tensors = load_file(self.folder / "checkpoint" / "latest.safetensors")
        start = f"strategy/model-{number}/"
        return {
            name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)
        }

    def own(self, site: str) -> dict[str, Tensor]:
        """The site's own complete model."""
        return load_file(find_model_file(self.folder, site))

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


class ListeningGrid(InProcessGrid):
    """Keeps what sites are sent and send, and lets a test change their training replies."""

    def __init__(self, settings: RunSettings, change: Change | None) -> None:
        self.names = list_simulated_sites(settings.load())
        super().__init__(client_app, build_site_contexts(len(self.names), dict(vars(settings))))
        self.asked: list[Message] = []
        self.sent: list[Message] = []
        self._change = change

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.asked += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        request = self._queue[0] if self._queue else None
        for reply in super().pull_messages(message_ids):
            assert request is not None
            message = reply
            if self._change is not None and read_kind(reply.content) == "TrainReply":
                site = self.names[request.metadata.dst_node_id - 1]
                changed = self._change(site, TrainReply.from_record(reply.content))
                message = Message(changed.to_record(), reply_to=request)
            self.sent.append(message)
            yield message


def run(folder: Path, change: Change | None = None, strategy: Any = None, **changes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    chosen: Any = strategy or {}
    if "name" not in chosen and not isinstance(chosen, str):
        chosen = STRATEGY | chosen
    path.write_text(yaml.safe_dump(EXPERIMENT | {"strategy": chosen} | changes))
    return go(RunSettings(str(path), runs=str(folder / "runs")), change)


def go(settings: RunSettings, change: Change | None = None) -> Run:
    grid = ListeningGrid(settings, change)
    run_config = dict(vars(settings))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    summary = serve(grid, context, "in-process")
    return Run(Path(settings.runs) / "fedperc", summary, grid.asked, grid.sent)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
