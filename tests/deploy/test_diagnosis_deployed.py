"""Faults of real processes: every surface names one cause, owner and command, and that command ends them."""

import html
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.live.hospital import HospitalPages
from perennial.live.web import list_allowed_hosts
from perennial.server.faults import KINDS, Fault
from tests.live_pages import ask, operator_pages, room_for, served, until
from tests.loopback import ENTERED, QuickDeployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SITES = ["site-0", "site-1"]
CALM = "Nothing needs attention."
SECONDS = 120.0
"""Patience of a busy machine; on an idle one each fault is named within 30 s."""
EXPERIMENT: dict[str, Any] = {
    "name": "trial",
    "data": {"source": "digits", "sites": 2, "samples_limit": 100, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 1000},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 2, "quorum": 1, "deadline": 60},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}


class Watched:
    """A federation of two sites, its operator's pages, and the page of site-1, all served as for people."""

    def __init__(self, stack: ExitStack) -> None:
        self.there = stack.enter_context(QuickDeployment(SITES))
        self.there.init()
        self.experiment = self.there.folder / "experiment.yaml"
        self.experiment.write_text(yaml.safe_dump(EXPERIMENT))
        self.fab, self.digest = self.there.deploy("stage", self.experiment).split()[-2:]
        self.there.start_superlink()
        for name in SITES:
            self.there.make_site(name)
            self.there.edit_site(name, data=None)
            self.there.start_site(name)
        runs = self.there.operator / "state" / "runs"
        self.pages = stack.enter_context(operator_pages(runs))
        own = HospitalPages(self.there.site_file("site-1"))
        self.page = stack.enter_context(served(own.app(list_allowed_hosts("127.0.0.1", []))))

    def approve(self, name: str) -> None:
        self.there.perennial("site", "approve", self.fab, self.digest, "--site", self.there.site_file(name))

    def status(self) -> list[dict[str, str]]:
        """The faults of `perennial deploy status --json`."""
        return json.loads(self.there.deploy("status", "--json"))["faults"]

    def at_site(self) -> str:
        """The hospital's page as its engineer reads it."""
        return html.unescape(ask(self.page).body)

    def names(self, kind: str, site: str = "", run: str = "", key: str = "") -> None:
        """Every surface that may know comes to name this fault, and none says that all is well."""
        fault = Fault(kind, site, run, key=key)
        seen, words = KINDS[kind].seen, (fault.cause, fault.turn)

        def all_say_so() -> bool:
            bodies = [html.unescape(ask(self.pages).body)]
            bodies += [html.unescape(ask(f"{self.pages}/runs/trial").body)] if self.runs else []
            bodies += [self.at_site()] if "h" in seen and site else []
            metrics = ask(f"{self.pages}/metrics").body
            labels = (f'cause="{fault.cause}"', f'owner="{fault.owner}"', f'command="{fault.command}"')
            return all(word in body and CALM not in body for body in bodies for word in words) and any(
                all(label in line for label in labels) for line in metrics.splitlines()
            )

        self._until(all_say_so, f"{fault.said} {fault.turn}")
        found = [one for one in self.status() if (one["kind"], one["site"]) == (kind, site)]
        assert [(one["cause"], one["owner"], one["command"]) for one in found] == [
            (fault.cause, fault.owner, fault.command)
        ]

    def until_at_site(self, fault: Fault) -> None:
        """The hospital's page comes to name a fault that nobody else can know."""
        self._until(lambda: all(words in self.at_site() for words in (fault.cause, fault.turn)), fault.said)

    def ended(self, kind: str, site: str = "") -> None:
        """No surface names it any more."""
        words = Fault(kind, site, "trial").cause

        def nobody_says_so() -> bool:
            pages = [ask(self.pages).body, ask(f"{self.pages}/metrics").body, self.at_site()]
            return all(words not in html.unescape(page) for page in pages)

        self._until(nobody_says_so, f"the end of: {words}")
        assert kind not in [one["kind"] for one in self.status()]

    @property
    def runs(self) -> bool:
        return (self.there.operator / "state" / "runs" / "trial" / "events.jsonl").is_file()

    def _until(self, check: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            # the machine is busy with rounds
            time.sleep(0.5)
            return check()

        try:
            until(looked, SECONDS)
        except AssertionError as error:
            listed = re.findall(r"<strong>(.*?)</li>", ask(self.pages).body + self.at_site())
            raise AssertionError(
                f"{what}: {error}; pages: {listed}; {self.status()} {self.there.logs()}"
            ) from error


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with room_for(1e12), ExitStack() as stack:
        made = Watched(stack)
        if not made.there.pinned:
            pytest.skip("root, and nothing to bind root by permissions with")
        yield made


def test_a_site_that_has_not_approved_is_named_and_takes_part_once_it_has(watched: Watched) -> None:
    there = watched.there
    watched.approve("site-0")
    there.deploy("submit", watched.experiment)
    watched.names("not_approved", "site-1", "trial")
    # site-0 is away until it too has said who it is, which may be after the refusal
    all_there = 'perennial_run_sites{run="trial",state="offline"} 0.0'
    until(lambda: all_there in ask(f"{watched.pages}/metrics").body, SECONDS)
    page = ask(f"{watched.pages}/runs/trial").body
    row = re.search(r'>site-1</t[hd]><td[^>]*><span class="pill (\w+)"', page)
    assert row is not None and row.group(1) == "refused", "in the table, and not offline"
    watched.approve("site-1")
    watched.ended("not_approved", "site-1")


def test_a_pause_says_whose_it_is(watched: Watched) -> None:
    there = watched.there
    there.perennial("site", "pause", there.site_file("site-1"))
    watched.names("site_paused", "site-1", "trial")
    there.perennial("site", "resume", there.site_file("site-1"))
    watched.ended("site_paused", "site-1")
    there.deploy("pause", "trial")
    watched.names("paused", "", "trial")
    there.deploy("resume", "trial")
    watched.ended("paused")


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"answers": ["evaluate"]}, "policy.answers"),
        # a budget is no budget for what has no noise; one that is spent is in tests/live/test_diagnosis.py
        ({"max_epsilon": 0.5}, "policy.max_epsilon"),
    ],
)
def test_a_refusal_names_the_rule(watched: Watched, policy: dict[str, Any], key: str) -> None:
    watched.there.edit_site("site-1", policy=policy)
    watched.names("policy", "site-1", "trial", key)
    watched.there.open_site("site-1")
    watched.ended("policy", "site-1")


def test_a_dead_supernode_is_named_until_it_is_started(watched: Watched) -> None:
    watched.there.kill("site-1")
    watched.names("silent", "site-1")
    watched.there.start_site("site-1")
    watched.ended("silent", "site-1")


def test_a_revoked_site_comes_back_with_a_new_key(watched: Watched) -> None:
    there, key = watched.there, watched.there.folder / "site-1" / "new" / "node.key"
    there.deploy("revoke", "site-1")
    watched.names("revoked", "site-1")
    there.wait_for_end("site-1")
    there.perennial("site", "open", "--folder", key.parent)
    there.edit_site("site-1", connection={"key": "new/node.key"})
    # the operator has not heard of the new key; the gateway tells the hospital
    watched.until_at_site(Fault("unregistered", "site-1"))
    there.deploy("add-site", "site-1", f"{key}.pub")
    before = there.log("site-1").count(ENTERED)
    there.start_site("site-1")
    until(lambda: there.log("site-1").count(ENTERED) > before, SECONDS)
    watched.ended("revoked", "site-1")
    watched.ended("unregistered", "site-1")


def test_a_dead_superlink_and_its_run_are_named_until_they_are_started(watched: Watched) -> None:
    watched.there.kill("superlink")
    watched.names("superlink")
    watched.there.start_superlink()
    watched.ended("superlink")
    watched.names("serverapp", "", "trial")
    until(lambda: "resumed as" in watched.there.deploy("resume", "trial"), SECONDS)
    watched.ended("serverapp")


def test_accuracy_that_collapsed_is_named_and_a_setting_that_was_named_mends_it(tmp_path: Path) -> None:
    content = {**EXPERIMENT, "tasks": {"count": 1, "rounds": 4}, "rounds": {}}
    content["data"] = {"source": "digits", "sites": 2, "partition": {"kind": "iid"}}

    def run(name: str, learner: dict[str, Any]) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, "name": name, "learner": learner}))
        run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs")))
        return html.unescape((tmp_path / "runs" / name / "report.html").read_text())

    report = run("flat", {"preset": "none", "optimizer": {"name": "sgd", "lr": 10.0}})
    with room_for(1e12), operator_pages(tmp_path / "runs") as address:
        found = [line for line in ask(f"{address}/metrics").body.splitlines() if 'kind="collapsed"' in line]
        (labels,) = [dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line)) for line in found]
        cause, turn = labels["cause"], f"Operator: {labels['command']}."
        assert "adam" in labels["command"] and labels["run"] == "flat" and labels["owner"] == "operator"
        for body in (report, ask(address).body, ask(f"{address}/runs/flat").body):
            assert cause in html.unescape(body) and turn in html.unescape(body) and CALM not in body
        report = run("mended", {"preset": "none", "optimizer": {"name": "adam", "lr": 0.001}, "epochs": 5})
        assert "does not tell classes apart" not in report
        until(lambda: "mended" in ask(f"{address}/metrics").body, 20)
        assert "does not tell classes apart" not in html.unescape(ask(f"{address}/runs/mended").body)
