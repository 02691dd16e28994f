"""An operator that submits an approved app with other settings, or an app with code, and a site that says
another's name: with real SuperNodes."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.deploy.application import PROJECT, build_archive, pack_archive, read_application
from perennial.deploy.control import start_run
from perennial.deploy.federation import OperatorFolder
from perennial.foundation.errors import NOT_APPROVED
from perennial.foundation.files import replace_file
from tests.live_pages import until
from tests.loopback import Deployment

SITES = ["graz", "linz"]
EXPERIMENT: dict[str, Any] = {
    "name": "guarded",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.2},
    "evaluation": {"federated": False},
    "rounds": {"wait_for": 1, "deadline": 60},
}


@pytest.fixture(scope="module")
def federation() -> Iterator[Deployment]:
    with Deployment(SITES) as deployment:
        deployment.init()
        path = deployment.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(EXPERIMENT))
        said = dict(zip(SITES, ("site-0", "site-1"), strict=True))
        deployment.prepare(path, lambda site: {"data": None, "site": said[site]})
        if deployment.pinned:
            deployment.start_site("graz")
        yield deployment


def hostile_run(deployment: Deployment, name: str, **settings: str) -> tuple[str, str]:
    """What `flwr run` starts with the approved app and other settings: (status, what the server said)."""
    operator = OperatorFolder(deployment.operator)
    whole = {"name": name, "runs": str(operator.root / "state" / "runs"), **settings}
    app = read_application("guarded", operator.apps)
    run = start_run(operator, pack_archive(app.folder), app.digest, whole)
    runs = operator.apps / "guarded.runs.json"
    replace_file(runs, json.dumps([run]).encode(), mode=0o644)
    status = deployment.wait_for_run("guarded")
    return status, deployment.deploy("logs", "guarded")


def charged(deployment: Deployment) -> list[Path]:
    return [path for name in SITES for path in (deployment.folder / name / "state").glob("ledger.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_approved_app_answers_with_the_settings_that_were_approved(federation: Deployment) -> None:
    if not federation.pinned:
        pytest.skip("root, and nothing to bind root by permissions with")
    status, said = hostile_run(federation, "hostile", overrides="privacy={mode: none}")
    assert status == "finished:failed", federation.logs()
    assert "policy: run config: overrides: found 'privacy={mode: none}'" in said, said
    assert charged(federation) == [], "nothing was released"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_site_that_says_anothers_name_takes_no_part_and_is_named(federation: Deployment) -> None:
    if not federation.pinned:
        pytest.skip("root, and nothing to bind root by permissions with")
    status, said = hostile_run(federation, "guarded")
    assert status == "finished:failed"
    assert "it says it is site 'site-0', but its key is that of site 'graz'" in said, said
    assert "a name that its key is not registered for" in federation.deploy("status")
    assert charged(federation) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_app_with_code_whose_version_leaves_its_folder_runs_nothing_at_a_site(
    federation: Deployment,
) -> None:
    if not federation.pinned:
        pytest.skip("root, and nothing to bind root by permissions with")
    operator, ran = OperatorFolder(federation.operator), federation.folder / "graz" / "state" / "ran"
    approved = read_application("guarded", operator.apps)
    files = {path.name: path.read_bytes() for path in approved.folder.iterdir() if path.is_file()}
    version = f"0.2.0.{approved.digest[:8]}/../../../state/x"
    project = files[PROJECT].decode().replace('version = "0.2.0"', f'version = "{version}"')
    files[PROJECT] = project.replace("perennial.client.app:app", "code_of_the_operator:app").encode()
    files["code_of_the_operator.py"] = f"open({str(ran)!r}, 'w')\n".encode()
    fab = build_archive(files)
    settings = {"name": "evil", "runs": str(operator.root / "state" / "runs")}
    start_run(operator, fab, hashlib.sha256(fab).hexdigest(), settings)
    until(lambda: NOT_APPROVED in federation.log("graz") or ran.exists(), 120)
    assert not ran.exists() and "code_of_the_operator" not in federation.log("graz")
    assert not [*(federation.folder / "graz" / "state").glob("x.*")]
