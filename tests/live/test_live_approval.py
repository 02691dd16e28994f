"""Approving and refusing an offered app on the hospital's page, and notices of one that waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from perennial.config.approval import read_approvals
from perennial.config.site import load_site_config
from perennial.deploy.bundle import open_bundle, write_bundle
from perennial.deploy.federation import Federation, create_operator_folder
from perennial.deploy.keys import make_node_key, public_line
from perennial.deploy.operations import stage
from perennial.live.guard import Sessions, allowed_hosts
from perennial.live.hospital import HospitalPages
from perennial.live.notices import Notices
from tests.live.test_live_site import signed_in
from tests.live_pages import TOKEN, ask, served, until

CONTENT = {
    "name": "small",
    "data": {"source": "digits", "sites": 2},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
    "tasks": {"count": 2, "rounds": 1},
}


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A hospital's folder with one offered app, and the app's SHA-256."""
    folder = tmp_path_factory.mktemp("offered")
    federation = Federation(name="test", hosts=("fl.example.org",), runtime="process")
    operator = create_operator_folder(folder / "federation", federation, 30)
    experiment = folder / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(CONTENT))
    app = stage(operator, experiment, [], "")
    operator.add_site("graz", public_line(make_node_key()))
    open_bundle(write_bundle(operator, "graz"), folder / "graz", None)
    return folder / "graz", app.digest


@contextmanager
def page(folder: Path, notices: Notices | None = None) -> Iterator[str]:
    found = HospitalPages(folder / "site.yaml", Sessions(TOKEN, "perennial-site", secure=False), notices)
    with served(found.app(allowed_hosts("127.0.0.1", []))) as address:
        yield address


def test_an_app_is_approved_by_the_told_hash_disapproved_and_refused(offered: tuple[Path, str]) -> None:
    folder, digest = offered
    (fab,) = (folder / "offered").glob("*.fab")
    approvals = load_site_config(folder / "site.yaml").approvals
    with page(folder) as address:
        cookie, form = signed_in(address)

        def send(action: str, **fields: str) -> int:
            return ask(f"{address}/{action}", {"form": form, **fields}, Cookie=cookie, Origin=address).status

        until(lambda: "to be decided" in ask(address, Cookie=cookie).body)
        shown = ask(address, Cookie=cookie).body
        assert fab.name in shown and "privacy" in shown, "what it asks is read before it is approved"
        asked = ask(f"{address}/approve?app={fab.name}", Cookie=cookie).body
        assert fab.name in asked and 'name="sha256"' in asked
        assert send("approve", app=fab.name, sha256="0" * 64) == 409
        assert send("approve", app="../../etc/passwd", sha256=digest) == 409
        assert read_approvals(approvals) == []
        assert send("approve", app=fab.name, sha256=digest) == 303
        (approved,) = read_approvals(approvals)
        assert approved.bundle == digest
        until(lambda: "/disapprove?app=" in ask(address, Cookie=cookie).body)
        assert send("disapprove", app=approved.app) == 303 and read_approvals(approvals) == []
        until(lambda: "to be decided" in ask(address, Cookie=cookie).body)
        assert send("refuse", app=fab.name) == 303
        assert not fab.exists() and list((folder / "offered").glob("*.refused"))
        until(lambda: "to be decided" not in ask(address, Cookie=cookie).body)
        assert send("approve", app=fab.name, sha256=digest) == 409
    next(iter((folder / "offered").glob("*.refused"))).rename(fab)


def test_an_app_that_waits_is_told_of_once_with_what_to_do(offered: tuple[Path, str]) -> None:
    told: list[dict[str, object]] = []
    with page(offered[0], Notices([told.append])):
        until(lambda: {"offer", "silent"} <= {notice["kind"] for notice in told}, 30)
    offers = [notice for notice in told if notice["kind"] == "offer"]
    assert len(offers) == 1 and offers[0]["run"] == "graz" and offers[0]["remedy"]
