"""From nothing to a finished run with an operator and two hospitals, by the commands that they type."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.server.summary import extract_hashes
from tests.loopback import ENTERED, Deployment, digit_folders, free_ports
from tests.split_keys import split_key_of

SITES = ["graz", "linz"]
CLASSES = [f"digit-{digit}" for digit in range(10)]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXPERIMENT = {
    "name": "hospitals",
    "data": {"source": "folder", "classes": CLASSES, "image_size": 8, "color": "gray"}
    | {"normalise": {"mean": 0.3, "std": 0.35}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "small_cnn"},
    "rounds": {"wait_for": 2, "deadline": 120},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
}


@pytest.fixture(scope="module")
def federation() -> Iterator[Deployment]:
    with Deployment(SITES) as deployment:
        deployment.init()
        digit_folders(deployment.folder / "data", SITES, 150)
        deployment.start_superlink()
        for name in SITES:
            deployment.make_site(name)
            deployment.edit_site(
                name,
                data={"path": str(deployment.folder / "data" / name)},
            )
        yield deployment


def write_experiment(deployment: Deployment, **changes: object) -> Path:
    path = deployment.folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    return path


def approve(deployment: Deployment, said: str) -> None:
    """What each hospital does with what `deploy stage` printed."""
    fab, digest = said.split()[-2:]
    for name in SITES:
        site = deployment.site_file(name)
        deployment.perennial("site", "approve", fab, "0" * 64, "--site", site, fails=True)
        deployment.perennial("site", "approve", fab, digest, "--site", site)


def test_a_federation_from_nothing_to_a_finished_run(federation: Deployment) -> None:
    experiment = write_experiment(federation)
    approve(federation, federation.deploy("stage", experiment))
    for name in SITES:
        federation.start_site(name)
    federation.deploy("submit", experiment)
    assert federation.wait_for_run("hospitals") == "finished:completed", federation.logs()
    there = json.loads((federation.operator / "state" / "runs" / "hospitals" / "summary.json").read_text())
    assert there["engine"] == "grpc"
    # the same sites, simulated
    data = {**EXPERIMENT["data"], "path": str(federation.folder / "data"), "partition": {"kind": "natural"}}
    path = federation.folder / "simulated.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "data": data}))
    with split_key_of(federation.operator / "state" / "runs" / "hospitals"):
        here = run_in_process(RunSettings(str(path), runs=str(federation.folder / "here")))
    assert extract_hashes(there) == extract_hashes(here)
    for name in SITES:
        ledger = (federation.folder / name / "state" / "ledger.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in ledger]
        assert kinds.count("update") == there["rounds"], "every release of a site is in its ledger"
        # of each task: counts, and the temperature that validation samples choose
        assert kinds.count("evaluation") == 2 * len(there["tasks"])
        assert (federation.folder / name / "tip" / "ledger.tip").exists(), "its head hash lies outside state/"
    status = federation.deploy("status")
    assert status.count("registered") == 2 and "finished:completed" in status


def test_an_app_that_was_not_approved_does_not_run(federation: Deployment) -> None:
    if not federation.pinned:
        pytest.skip("root, and nothing to bind root by permissions with")
    experiment = write_experiment(federation, name="unapproved", rounds={"deadline": 15})
    federation.deploy("submit", experiment)
    assert federation.wait_for_run("unapproved") == "finished:failed", federation.logs()
    assert "has not approved the app of this run" in federation.deploy("logs", "unapproved")


def test_a_check_proves_the_key_and_leaves_a_supernode_that_runs_alone(federation: Deployment) -> None:
    said = federation.perennial("site", "check", federation.site_file("graz"))
    assert "hospitals" in said and "knows its key" in said and "one runs already" in said
    assert federation.running("graz")
    # the same key on another machine
    copy = federation.folder / "copy"
    shutil.copytree(federation.folder / "graz", copy, ignore=shutil.ignore_patterns("state"))
    content = yaml.safe_load((copy / "site.yaml").read_text())
    content["connection"]["runtime_port"] = free_ports(1)[0]
    (copy / "site.yaml").write_text(yaml.safe_dump(content))
    said = federation.perennial("site", "check", copy / "site.yaml", fails=True)
    assert "another SuperNode is connected with this key" in said and "the key was copied" in said


def test_a_supernode_that_was_killed_is_let_in_again(federation: Deployment) -> None:
    federation.wait_for_log("graz", ENTERED)
    federation.restart_site("graz")
    assert federation.running("graz") and "Exit Code: 305" not in federation.log("graz")
    assert "knows its key" in federation.perennial("site", "check", federation.site_file("graz"))


def test_a_revoked_site_and_a_stranger_are_shut_out(federation: Deployment) -> None:
    federation.deploy("revoke", "linz")
    federation.wait_for_end("linz")
    federation.deploy("revoke", "linz")
    # its old key is known and cannot come back, nor can a key that was never registered
    federation.start_site("linz")
    assert federation.wait_for_end("linz") != 0
    assert "the operator has revoked this site's key" in federation.log("linz")
    said = federation.perennial("site", "check", federation.site_file("linz"), fails=True)
    assert "the operator has revoked this site's key" in said and "site open" in said
    federation.perennial("site", "open", "--folder", federation.folder)
    federation.edit_site("linz", connection={"key": "../node.key"})
    federation.start_site("linz")
    assert federation.wait_for_end("linz") != 0
    assert "this site's key is not registered at the SuperLink" in federation.log("linz")
    said = federation.perennial("site", "check", federation.site_file("linz"), fails=True)
    assert "is not registered" in said and "deploy add-site" in said


def test_a_site_with_another_authority_says_what_to_do(federation: Deployment) -> None:
    other = federation.folder / "other"
    federation.perennial("deploy", "init", other, "--host", "localhost", "--runtime", "process")
    federation.edit_site("graz", connection={"ca": str(other / "certificates" / "ca.crt")})
    said = federation.perennial("site", "check", federation.site_file("graz"), fails=True)
    assert "not signed by the authority" in said and "ca.crt" in said
