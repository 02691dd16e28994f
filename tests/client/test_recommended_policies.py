"""An ordinary run of each published method passes at the policy that its page recommends."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, RecordDict

from perennial.client.app import app as client_app
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import list_simulated_sites
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.server.app import serve
from tests.approved import approve_installed
from tests.redteam.attacked_hospital import template_policy

ROOT = Path(__file__).resolve().parents[2]
IID = "data.partition={kind: iid}"
SHORT = {
    "pp_fcil": ("pp_fcil_digits", ["tasks.count=2", "tasks.rounds=2"]),
    "incre_fl": (
        "incre_fl_digits",
        ["tasks.count=2", "tasks.rounds=1", "pretraining={samples: 40, rounds: 1}", IID],
    ),
    "feddig": (
        "feddig_digits",
        ["tasks.rounds=3", "strategy.server_epochs=1", "absence=[{site: site-0, first_round: 3}]"],
    ),
    "fedperc": ("fedperc_synth", ["tasks.rounds=2", "strategy.global_rounds=1"]),
    "tricon_sf": ("tricon_sf_digits", ["tasks.rounds=1"]),
}
RELEASED = {
    "pp_fcil": ["update"],
    "incre_fl": ["update"],
    "feddig": ["update", "digest"],
    "fedperc": ["update", "sparsity"],
    "tricon_sf": ["update"],
}


def recommended(page: str) -> dict[str, Any]:
    """The shipped policy with the keys that a method's page changes."""
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text()
    (block,) = [
        found for found in re.findall(r"```yaml\n(.*?)```", text, re.S) if found.startswith("policy:")
    ]
    return template_policy() | yaml.safe_load(block)["policy"]


@pytest.mark.parametrize("page", SHORT)
def test_a_run_of_the_method_passes(page: str, tmp_path: Path) -> None:
    name, overrides = SHORT[page]
    path = tmp_path / "experiment.yaml"
    path.write_text(load_experiment(ROOT / "experiments" / f"{name}.yaml", overrides).to_yaml())
    names = list_simulated_sites(load_experiment(path))
    digest = load_experiment(path).digest
    run = RunSettings(str(path), name="run", runs=str(tmp_path / "runs"), device="cpu", digest=digest)
    settings = dict(vars(run))
    contexts = build_site_contexts(len(names), settings)
    for (node, context), site in zip(contexts.items(), names, strict=True):
        folder = tmp_path / site
        folder.mkdir()
        content = {"site": site, "state_dir": "state", "device": "cpu", "policy": recommended(page)}
        (folder / "site.yaml").write_text(yaml.safe_dump(content))
        approve_installed(path, folder / "approvals")
        contexts[node] = Context(
            1, node, {"site": str(folder / "site.yaml")}, context.state, context.run_config
        )
    server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings)
    serve(InProcessGrid(client_app, contexts), server, engine="in-process")
    lines = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    for event in rounds:
        assert not event["skipped"] and len(event["participants"]) > len(names) / 2
        # what a site with little data keeps to itself is the floor's business, and nothing else is refused
        reasons = [found["reason"] for found in (*event["dropped"], *event["refused"])]
        assert all("policy.min_samples" in reason for reason in reasons), reasons
    for kind in RELEASED[page]:
        ledgers = [(tmp_path / site / "state" / "ledger.jsonl").read_text() for site in names]
        assert sum(f'"kind":"{kind}"' in ledger for ledger in ledgers) > len(names) / 2
    notes = [event["text"] for event in map(json.loads, lines) if event["event"] == "note"]
    refused = [text for text in notes if "policy" in text and "policy.min_samples" not in text]
    assert refused == []
