"""Each fault, scripted at the operator's: every surface that may know names one cause, owner and command."""

import html
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perennial.cli import deployment_status
from perennial.cli.main import app
from perennial.config.site import SitePolicy
from perennial.deploy.control import FlowerRun
from perennial.deploy.federation import Federation, OperatorFolder, SiteRecord, create_operator_folder
from perennial.foundation.errors import NOT_APPROVED
from perennial.foundation.heartbeat import SILENT_AFTER, keep_beating
from perennial.live.diagnosis import of_run
from perennial.live.operator import OperatorPages
from perennial.live.run_state import RunState
from perennial.server.control import ALIVE, locate_heartbeat
from perennial.server.faults import FORGETTING, KINDS, of_answer
from tests.deploy.test_superlink_status import said
from tests.live.test_live_state import EXPERIMENT
from tests.live_pages import GoingOn, room_for
from tests.run_folders import HOSTILE

CALM = "Nothing needs attention."
PLACE = r"\{(site|run|key|resume)\}"


class World:
    """A federation's folder with one run at graz and linz; every script changes what is known of it."""

    def __init__(self, operator: OperatorFolder, stack: ExitStack) -> None:
        self.operator, self.runs = operator, operator.state / "runs"
        self.stack = stack
        self.free = 1e12
        self.alive, self.flower = True, "running"
        self.federation()
        self.run = GoingOn(self.runs)
        self.began = False
        (self.run.folder / "experiment.yaml").write_text(EXPERIMENT)
        (operator.apps / "trial.runs.json").write_text('["7"]')
        self.round(1)

    def federation(self, **more: Any) -> None:
        """The SuperLink says this. linz: since when it is silent. others: sites that are not registered."""
        sites = {"graz": None, "linz": more.pop("linz", None)}
        self.unknown = more.get("unknown") or {}
        said(self.runs, sites, **more)
        for name, state in (more.get("others") or {}).items():
            self.operator.write_site(name, SiteRecord(state=state))

    def listed(self) -> dict[str, FlowerRun]:
        """Flower's runs as its Control API has them."""
        return {"7": FlowerRun(self.flower)} | {run: FlowerRun(was) for run, was in self.unknown.items()}

    def round(self, number: int, sites: tuple[str, ...] = ("graz", "linz"), **more: Any) -> None:
        self.run.begin_round(number, list(sites), **more)

    def end(self, number: int, sites: tuple[str, ...] = ("graz", "linz"), **more: Any) -> None:
        self.run.end_round(number, list(sites), **more)

    def task(self, accuracy: list[float], classes: list[float], **more: Any) -> None:
        names = [f"class {number}" for number in range(len(classes))]
        if not self.began:
            self.run.journal.write("task_started", task=1, classes=names)
        self.began = True
        facts = {"accuracy": accuracy, "average_accuracy": 0.5, "class_accuracy": classes}
        self.run.journal.write("task_finished", task=len(accuracy), **facts, **more)


def answered(reason: str, *, refused: bool = True) -> "State":
    """linz sends this in place of an answer, and then answers."""
    return State(
        lambda world: world.run.answer("linz", reason, refused=refused),
        lambda world: world.run.answer("linz"),
    )


def barred(reason: str) -> "State":
    """linz is connected, and takes no part; then it does."""
    return State(
        lambda world: world.round(1, ("graz",), refusing={"linz": reason}), lambda world: world.round(2)
    )


@dataclass
class State:
    """script: what leads to a fault. ended: what its command leads to; None: the fault stays."""

    script: Callable[[World], object]
    ended: Callable[[World], object] | None
    others: tuple[str, ...] = ()
    """Faults that stand beside it."""


def write(event: str, **facts: Any) -> Callable[[World], object]:
    return lambda world: world.run.journal.write(event, **facts)


def give(**facts: Any) -> Callable[[World], object]:
    return lambda world: vars(world).update(facts)


def pages_died(world: World) -> None:
    beat = locate_heartbeat(world.runs)
    beat.touch()
    old = time.time() - SILENT_AFTER - 5
    os.utime(beat, (old, old))


def waits_long(world: World) -> None:
    world.end(1)
    world.run.now.begin(round=2, rounds=9, online=["graz", "linz"], missing=[], task=1, tasks=1)
    world.run.now.write("asked", kind="train", sites=["linz"], time=time.time() - 1000)


def taken_port(world: World) -> None:
    world.federation(silence=SILENT_AFTER + 1)
    import socket

    taken = world.stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    settings = world.operator.federation.model_copy(update={"fleet_port": taken.getsockname()[1]})
    world.operator.federation = settings
    from perennial.deploy import federation

    federation._write_federation(world.operator.path, settings)


def submitted_long_ago(world: World) -> None:
    world.flower = "pending"
    old = time.time() - 100
    os.utime(world.operator.apps / "trial.runs.json", (old, old))


NO_NUMBERS = [{"site": site, "reason": "NaN"} for site in ("graz", "linz")]
REGISTERED = SiteRecord(state="registered", node="1")
MARKED = {"graz": {"marked": ""}, "linz": {"marked": "its labels are others"}}
POLICY = "policy: policy.answers: 'train' is not answered here; answered: none"
BUDGET = "privacy: policy.max_epsilon: the update for server would bring this site's lifetime epsilon to 9"
STATES: dict[str, State] = {
    "superlink": State(lambda w: w.federation(silence=SILENT_AFTER + 1), lambda w: w.federation()),
    "unknown_run": State(lambda w: w.federation(unknown={"99": "running"}), lambda w: w.federation()),
    "superexec": State(submitted_long_ago, give(flower="running")),
    "serverapp": State(give(alive=False), give(alive=True)),
    "pages": State(pages_died, lambda w: locate_heartbeat(w.runs).touch()),
    "superlink_port": State(taken_port, lambda w: w.federation(), ("superlink",)),
    "certificate_expired": State(lambda w: w.federation(ends=time.time() - 9), lambda w: w.federation()),
    "certificate_ends": State(lambda w: w.federation(ends=time.time() + 86_400), lambda w: w.federation()),
    "certificate_waits": State(
        lambda w: w.federation(ends=time.time() + 86_400, waits=True), lambda w: w.federation()
    ),
    "disk_full": State(give(free=1e6), give(free=1e12)),
    "disk_low": State(give(free=1e9), give(free=1e12)),
    "paused": State(write("paused", reason="paused by the operator"), write("went_on")),
    "stopped": State(write("stopped"), write("resumed", experiment="trial", engine="grpc")),
    "waiting": State(
        write("waiting", need=2, connected=["graz"], missing=[], refusing={}),
        write("sites", connected=["graz", "linz"], missing=[]),
    ),
    "quorum": State(
        write("paused", reason="round 1: no valid replies", missing=[], refusing={"linz": POLICY}),
        lambda w: [w.run.journal.write("went_on"), w.run.answer("linz")],
        ("policy",),
    ),
    "all_dropped": State(
        lambda w: w.end(1, (), skipped=True, dropped=NO_NUMBERS), lambda w: w.end(1), ("invalid", "invalid")
    ),
    "not_approved": barred(NOT_APPROVED),
    "other_code": barred("site 'linz' has experiment aaaa, this run bbbb"),
    "version": barred("site 'linz' speaks protocol version 0, this server 1"),
    "wrong_name": barred("it says it is site 'wels', but its key is that of site 'linz'"),
    "revoked": State(
        lambda w: [w.end(1), w.federation(others={"linz": "revoked"}), w.round(2, ("graz",))],
        lambda w: [w.federation(), w.operator.write_site("linz", REGISTERED), w.round(3)],
    ),
    "unregistered": State(
        lambda w: w.federation(others={"wels": "added"}),
        lambda w: [w.federation(), w.operator.write_site("wels", REGISTERED)],
    ),
    "silent": State(lambda w: w.federation(linz=time.time() - 30), lambda w: w.federation()),
    "deadline": State(lambda w: w.end(1, ("graz",), absent=["linz"]), lambda w: w.end(2)),
    "late": State(waits_long, lambda w: w.run.answer("linz")),
    "policy": answered(POLICY),
    "site_paused": answered("policy: this site pauses since 2026-11-24T10:00:00+00:00"),
    "withdrawn": State(answered("policy: this site has withdrawn from this run (today)").script, None),
    "budget": answered(BUDGET),
    "own_reason": answered("state: StateError; the details are in this site's own log"),
    "failed": answered("error at the site or on the way: it crashed", refused=False),
    "invalid": answered("update: holds NaN", refused=False),
    "contradicting": State(
        lambda w: w.end(1, details={"cross_site": MARKED}),
        lambda w: w.end(2, details={"cross_site": {"graz": {}, "linz": {}}}),
    ),
    "collapsed": State(
        lambda w: w.task([0.1], [0.1, 0.1], stopped=["of 2 classes the model recognises one"]),
        lambda w: w.task([0.8], [0.8, 0.8]),
    ),
    "unrecognised": State(lambda w: w.task([0.5], [0.0, 1.0]), lambda w: w.task([0.9], [0.9, 0.9])),
    "forgetting": State(
        lambda w: [w.task([0.9], [0.9]), w.task([0.9 - FORGETTING - 0.01, 0.9], [0.5])],
        lambda w: w.task([0.85, 0.9], [0.8]),
    ),
    "journal": State(lambda w: w.run.raw(b"no JSON\n"), None),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ports: dict[str, Any] = {"fleet_port": 1, "control_port": 2}
    settings = Federation(name="trials", hosts=("127.0.0.1",), runtime="process", **ports)
    return create_operator_folder(tmp_path_factory.mktemp("operator") / "here", settings, 60).path


@pytest.fixture
def world(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    shutil.copytree(template, tmp_path / "operator")
    with ExitStack() as stack:
        made = World(OperatorFolder(tmp_path / "operator"), stack)
        for name in ("graz", "linz"):
            made.operator.write_site(name, SiteRecord(state="registered", node="1"))
        # the Control API is asked in the slow tests
        monkeypatch.setattr(deployment_status, "list_runs", lambda _: made.listed())
        yield made


class Surfaces:
    """What every surface of the operator's says, each as (the words on it, the kinds of faults on it)."""

    def __init__(self, world: World) -> None:
        with room_for(world.free), ExitStack() as stack:
            if world.alive:
                stack.enter_context(keep_beating(world.run.folder / ALIVE))
            pages = OperatorPages(world.runs)
            self.overview = html.unescape(pages.draw_index())
            self.run_page = html.unescape(pages.draw_run("trial"))
            self.metrics = pages.write_metrics().decode()
            command = ["deploy", "status", "--folder", str(world.operator.path)]
            self.status = " ".join(CliRunner().invoke(app, command, catch_exceptions=False).output.split())
            as_json = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).output
            self.faults = json.loads(as_json)["faults"]

    def labels(self) -> list[dict[str, str]]:
        """Of each fault in the metrics."""
        found = re.findall(r"^perennial_fault\{(.*)\} 1\.0$", self.metrics, re.MULTILINE)
        return [dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)) for labels in found]


def test_where_nothing_is_wrong_every_page_says_so(world: World) -> None:
    calm = Surfaces(world)
    assert CALM in calm.overview and CALM in calm.run_page and CALM in calm.status
    assert not calm.faults and not calm.labels()


def test_a_superlink_that_died_since_its_last_heartbeat_is_a_fault_and_no_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with socket.socket() as nobody:  # its port is taken, and nothing answers there
        nobody.bind(("127.0.0.1", 0))
        settings = world.operator.path / "deploy.yaml"
        settings.write_text(
            re.sub("control_port: .*", f"control_port: {nobody.getsockname()[1]}", settings.read_text())
        )
        said = CliRunner().invoke(app, ["deploy", "status", "--folder", str(world.operator.path), "--json"])
    assert said.exit_code == 0, said.output
    assert "does not answer list-runs" in said.stderr
    assert json.loads(said.stdout)["faults"][0]["kind"] == "superlink"


@pytest.mark.parametrize("kind", STATES)
def test_all_surfaces_name_one_cause_owner_and_command(world: World, kind: str) -> None:
    state = STATES[kind]
    state.script(world)
    seen = Surfaces(world)
    surfaces = KINDS[kind].seen
    # each page that may know, and only those
    by_status = [fault["kind"] for fault in seen.faults]
    assert sorted(by_status) == sorted([kind] * ("s" in surfaces) + [*state.others]), seen.faults
    by_pages = [labels["kind"] for labels in seen.labels()]
    assert sorted(by_pages) == sorted([kind] * ("p" in surfaces) + [*state.others])
    (named,) = {
        (found["cause"], found["owner"], found["command"])
        for found in (*seen.faults, *seen.labels())
        if found["kind"] == kind
    }
    cause, owner, command = named
    assert owner == KINDS[kind].owner and command and not re.search(PLACE, cause + command)
    turn = f"{owner.capitalize()}: {command}."
    if "s" in surfaces:
        assert cause in seen.status and turn in seen.status and CALM not in seen.status
    if "p" not in surfaces:
        return
    assert CALM not in seen.overview + seen.run_page
    for page in (seen.overview, seen.run_page):
        assert f"<strong>{cause}" in page and turn in page
    if state.ended is not None:
        state.ended(world)
        after = Surfaces(world)
        assert kind not in [fault["kind"] for fault in (*after.faults, *after.labels())]


def test_every_kind_is_scripted_by_its_side() -> None:
    from tests.live.test_site_diagnosis import STATES as AT_SITE

    operators = {kind for kind, facts in KINDS.items() if set(facts.seen) & {"p", "s"}}
    hospitals = {kind for kind, facts in KINDS.items() if "h" in facts.seen}
    assert operators == STATES.keys() and hospitals == AT_SITE.keys()
    assert len(KINDS) >= 30
    assert {facts.owner for facts in KINDS.values()} == {"operator", "hospital", "network", "nobody"}


@pytest.mark.parametrize("rule", [*SitePolicy.model_fields, "runs", "gigabytes"])
def test_a_refusal_by_each_rule_of_a_hospital_names_the_rule(rule: str) -> None:
    block = "policy" if rule in SitePolicy.model_fields else "state"
    fault = of_answer("linz", "trial", f"policy: {block}.{rule}: found 9, allowed 3")
    assert (fault.kind, fault.owner) == ("policy", "hospital") and f"{block}.{rule}" in fault.command
    assert "found 9, allowed 3" in fault.said


@pytest.mark.parametrize("kind", ["state", "data", "error"])
def test_what_a_hospital_alone_knows_is_no_word_of_the_operators(kind: str) -> None:
    secret = "/data/ward-7/Mrs. Example.png: No space left on device; the ledger lacks line 3"
    fault = of_answer("linz", "trial", f"{kind}: {secret}")
    assert fault.kind == "own_reason" and "ask the hospital" in fault.command
    assert secret not in json.dumps([*fault.collect_facts().values(), fault.said, fault.turn])
    assert of_answer("linz", "", f"{kind}: {secret}", here=True).kind == "site_disk_full"


def test_an_unapproved_site_is_in_the_table_and_is_not_offline(world: World) -> None:
    world.round(1, ("graz",), refusing={"linz": NOT_APPROVED})
    seen = Surfaces(world)
    assert 'perennial_run_sites{run="trial",state="refused"} 1.0' in seen.metrics
    assert 'perennial_run_sites{run="trial",state="offline"} 0.0' in seen.metrics
    state = RunState(world.run.folder)
    with keep_beating(world.run.folder / ALIVE):
        state.read()
        sites = {site.name: (site.status, site.reason) for site in state.sites()}
    assert sites["linz"] == ("refused", NOT_APPROVED) and sites["graz"][0] == "training"
    assert "not connected" not in seen.overview.lower()


def test_words_of_a_site_stay_text_on_every_surface(world: World) -> None:
    world.round(2, ("graz", HOSTILE[:60]))
    world.run.answer(HOSTILE[:60], f"policy: {HOSTILE}", refused=True)
    pages = OperatorPages(world.runs)
    drawn = pages.draw_index() + pages.draw_run("trial")
    assert "alert(1)" in drawn and "<script>" not in drawn and "<img" not in drawn
    assert len(Surfaces(world).labels()) == 1


def test_accuracy_that_falls_within_a_task_is_named_before_its_end(world: World) -> None:
    state = RunState(world.run.folder)

    def kinds() -> list[str]:
        with room_for(1e12), keep_beating(world.run.folder / ALIVE):
            state.read()
            return [fault.kind for fault in of_run(state)]

    for number, accuracy in enumerate((0.5, 0.8, 0.3, 0.2), start=1):
        world.end(number, accuracy=accuracy)
        assert not kinds()
    world.end(5, accuracy=0.1)
    assert kinds() == ["collapsed"]
    world.end(6, accuracy=0.7)
    assert not kinds()
