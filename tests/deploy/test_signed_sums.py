"""Certificates over real gRPC: keys that node keys certify, an auditor with a list of keys, a withdrawal."""

import json
from pathlib import Path

import pytest
import yaml

from tests.loopback import Deployment

SITES = ["site-0", "site-1", "site-2"]
EXPERIMENT = {
    "name": "hospitals",
    "data": {
        "source": "digits",
        "sites": 3,
        "samples_limit": 400,
        "validation_fraction": 0.0,
        "partition": {"kind": "iid"},
    },
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "features", "features": [{"name": "random", "width": 40}]},
    "rounds": {"wait_for": 3, "quorum": 3, "deadline": 300},
    "strategy": {"name": "analytic", "head": "ridge"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_signed_sums_of_real_sites_convince_who_brings_their_node_keys() -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        path = deployment.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(EXPERIMENT))
        policy = {"answers": ["statistics"], "require_privacy": "none", "max_epsilon": None, "min_samples": 1}
        deployment.prepare(path, lambda site: {"data": None, "policy": policy})
        deployment.start_sites()
        deployment.submit()
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()
        run = deployment.run_folder
        keys = deployment.folder / "keys.txt"
        node_keys = [(deployment.operator / "sites" / f"{name}.pub").read_text().split() for name in SITES]
        lines = [f"{kind} {key} {name}" for (kind, key, *_), name in zip(node_keys, SITES, strict=True)]
        keys.write_text("\n".join(lines))
        said = deployment.perennial("verify", run, "--keys", keys)
        assert "6 signed sums of 3 sites" in said
        assert "certified by a node key" in deployment.perennial("verify", run)
        keys.write_text("\n".join(lines[:2]))
        said = deployment.perennial("verify", run, "--keys", keys, fails=True)
        assert "site-2" in said and "not in your list" in said
        keys.write_text("\n".join(lines))
        # each site's ledger notes what it signed
        for name in SITES:
            signed = json.loads(next((deployment.folder / name).rglob("statements.json")).read_text())
            ledger = (deployment.folder / name / "state" / "ledger.jsonl").read_text()
            assert len(signed) == 2 and ledger.count('"note":"statement ') == 2
        # a site withdraws, and the operator takes its sums out
        token = json.loads((run / "statements.json").read_text())["run"]
        site_file = deployment.site_file("site-1")
        said = deployment.perennial("site", "withdraw", site_file, "--run", token)
        assert "perennial withdraw RUN --site NAME" in said
        second = Path(deployment.perennial("withdraw", run, "--site", "site-1").split()[0])
        said = deployment.perennial("verify", second, "--keys", keys)
        assert "4 signed sums of 2 sites" in said and "site-1" not in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_sites_choose_again_when_one_has_withdrawn() -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        path = deployment.folder / "experiment.yaml"
        data = EXPERIMENT["data"] | {"validation_fraction": 0.2}
        rounds = EXPERIMENT["rounds"] | {"quorum": 2}
        path.write_text(
            yaml.safe_dump(
                EXPERIMENT
                | {"data": data, "rounds": rounds, "strategy": {"name": "analytic", "head": "auto"}}
            )
        )
        answers = ["statistics", "evaluate"]
        policy = {"answers": answers, "require_privacy": "none", "max_epsilon": None, "min_samples": 1}
        deployment.prepare(path, lambda site: {"data": None, "policy": policy})
        deployment.start_sites()
        deployment.submit()
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()
        folder = deployment.run_folder
        token = json.loads((folder / "events.jsonl").read_text().splitlines()[0]).get("run")
        token = token or next((deployment.folder / "site-1").rglob("statements.json")).parent.name
        said = deployment.perennial("site", "withdraw", deployment.site_file("site-1"), "--run", token)
        said = deployment.perennial("withdraw", folder, "--site", "site-1")
        assert "perennial deploy resume hospitals" in said and not (folder / "model.safetensors").exists()
        assert "resumed as" in deployment.perennial(
            "deploy", "resume", "hospitals", "--folder", deployment.operator
        )
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()
        assert (folder / "model.safetensors").exists()
        found = sorted(path.name for path in (folder / "statistics").iterdir())
        assert found == [f"site-{site}-task-000{task}.safetensors" for site in (0, 2) for task in (1, 2)]
