"""Digests on the way that messages take between machines, and a site that is really away."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde_utils import metadata_from_proto, metadata_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.protocol.tensors import TensorArray
from perennial.server.app import serve
from perennial.server.summary import extract_hashes
from tests.loopback import Deployment

EXPERIMENT: dict[str, Any] = {
    "name": "wire",
    "seed": 3,
    "data": {"source": "digits", "sites": 2, "samples_limit": 160, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 2, "last_round": 2}],
    "evaluation": {"federated": False},
}


def by_bytes(message: Message) -> Message:
    """What arrives of a message: Flower's objects, taken apart into bytes and built up again."""
    objects = get_all_nested_objects(message.content)
    contents = {name: part.deflate() for name, part in objects.items()}
    content = inflate_object_from_contents(message.content.object_id, contents)
    assert isinstance(content, RecordDict)
    metadata = metadata_from_proto(metadata_to_proto(message.metadata))
    for record in content.array_records.values():
        assert not any(isinstance(array, TensorArray) for array in record.values())
    return make_message(metadata, content=content)


class Wire:
    """A ClientApp at the other end of a connection. kinds: of the messages that went down."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, message: Message, context: Context) -> Message:
        self.kinds.append(message.metadata.message_type)
        return by_bytes(client_app(by_bytes(message), context))


def settings(folder: Path, runs: str) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    return RunSettings(str(path), runs=str(folder / runs))


def test_digests_that_crossed_as_bytes_give_the_bits_of_those_that_did_not(tmp_path: Path) -> None:
    run_config = dict(vars(settings(tmp_path, "wire")))
    client = Wire()
    grid = InProcessGrid(client, build_site_contexts(2, run_config))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    there = serve(grid, context, engine="in-process")
    here = run_in_process(settings(tmp_path, "here"))
    assert extract_hashes(there) == extract_hashes(here)
    assert there["digest"] == here["digest"]
    assert there["digest"]["sites"]["site-1"]["rounds_stood_in"] == 1
    assert sum("digest" in kind for kind in client.kinds) == 4


@pytest.mark.slow
def test_a_site_whose_machine_stops_is_stood_in_for(tmp_path: Path) -> None:
    experiment = {
        **EXPERIMENT,
        "tasks": {"count": 1, "rounds": 5},
        "absence": [],
        "rounds": {"wait_for": 2, "deadline": 20},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    sites = ["site-0", "site-1"]
    with Deployment(sites) as federation:
        federation.init()
        policy = {"answers": ["train", "evaluate", "digest"]}
        federation.prepare(path, lambda site: {"data": None, "policy": policy})
        federation.start_sites()
        federation.deploy("submit", path)
        ledger = federation.folder / "site-1" / "state" / "ledger.jsonl"
        until = time.monotonic() + 120
        while not (ledger.exists() and '"update"' in ledger.read_text()):
            assert time.monotonic() < until, federation.logs()
            time.sleep(0.1)
        federation.kill("site-1")
        assert federation.wait_for_run("wire") == "finished:completed", federation.logs()
        folder = federation.operator / "state" / "runs" / "wire"
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        kinds = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert list(rounds[-1]["details"]["digests"]["stood_in"]) == ["site-1"]
    assert list(rounds[-1]["participants"]) == ["site-0"]
    assert summary["digest"]["sites"]["site-1"]["rounds_stood_in"] >= 3
    assert kinds.count("digest") == 1, "lent once, and in its ledger"
