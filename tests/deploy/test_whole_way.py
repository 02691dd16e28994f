"""The commands of docs/deploy.md from nothing to a run of three hospitals: counted, and typed as they are."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from perennial.deploy import control
from perennial.deploy.control import FlowerRun
from perennial.deploy.federation import OperatorFolder
from tests.loopback import LOOPBACK, ROOT, QuickDeployment, digit_folders

SITES = ["graz", "linz", "wels"]
MOST = 14
EXPERIMENT = {
    "name": "hospitals",
    "data": {"source": "folder", "classes": [f"digit-{digit}" for digit in range(10)], "image_size": 8}
    | {"color": "gray", "normalise": {"mean": 0.3, "std": 0.35}},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 3, "deadline": 240},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}


def documented() -> tuple[list[str], list[str]]:
    """The operator's commands, and those of each hospital."""
    body = (ROOT / "docs" / "deploy.md").read_text().split("## The whole way")[1].split("\n## ")[0]
    operators, hospitals = re.findall(r"^```\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    return operators.splitlines(), hospitals.splitlines()


def type_all(there: QuickDeployment, start: Callable[[str], None]) -> int:
    """Type every command in the parent of the federation's folder; how many there were.

    start: takes the commands that last.
    """
    operators, hospitals = documented()
    typed, said, folder = 0, "", there.folder
    (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))

    def enter(line: str) -> None:
        nonlocal typed, said
        typed += 1
        words = shlex.split(line)
        if words[2] == "start":
            start(line)
        else:
            said += there.perennial(*words[1:])

    ports = f" --fleet-port {there.fleet} --control-port {there.control}"
    enter(operators[0].replace("fl.example.org", "localhost") + ports)
    deploy = folder / "federation" / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({**yaml.safe_load(deploy.read_text()), "fleet_host": LOOPBACK}))
    for line in operators[1:3]:
        enter(line)
    for name in SITES:
        enter(hospitals[0].replace("graz", name))
        shutil.copy(folder / name / "node.key.pub", folder / f"{name}.pub")
    enter(operators[3])
    for name in SITES:
        shutil.copy(folder / "federation" / "bundles" / f"{name}.tar.gz", folder)
        digest = re.search(r"SHA-256 (\w{64})", said)
        assert digest is not None
        enter(hospitals[1].replace("graz", name).replace("SHA256", digest[1]))
        data = {"path": str(folder / "data" / name)}
        there.edit_site(name, connection={"runtime_port": there.ports[name]}, data=data)
        there.open_site(name)
        enter(hospitals[2].replace("graz", name))
    return typed


def test_the_way_of_three_hospitals_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, runs, started = iter("123"), dict[str, FlowerRun](), list[str]()

    def start_run(folder: OperatorFolder, fab: bytes, digest: str, settings: dict[str, str]) -> str:
        runs["9"] = FlowerRun("pending", digest, settings["name"])
        return "9"

    monkeypatch.setattr(control, "register_node", lambda folder, name: next(nodes))
    monkeypatch.setattr(control, "list_runs", lambda folder: runs)
    monkeypatch.setattr(control, "start_run", start_run)
    with QuickDeployment(SITES) as there:
        assert type_all(there, started.append) <= MOST
        assert started[0] == "perennial deploy start federation" and len(started) == 4 and runs
        for name in SITES:
            assert len(list((there.folder / name / "flower" / "apps").iterdir())) == 1, "approved"
        wrong = there.folder / "graz.tar.gz", "0" * 64
        there.perennial("site", "open", *wrong, "--folder", there.folder / "graz", fails=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_way_of_three_hospitals_leads_to_a_finished_run() -> None:
    with QuickDeployment(SITES) as there:
        digit_folders(there.folder / "data", SITES, 100)

        def start(line: str) -> None:
            name = Path(line.rsplit(maxsplit=1)[-1]).parent.name
            if name in SITES:
                there.start_site(name)
            else:
                there.start_superlink()

        assert type_all(there, start) <= MOST
        assert there.wait_for_run("hospitals", 300) == "finished:completed", there.logs()
