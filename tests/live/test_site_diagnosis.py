"""Each fault that a hospital may know, scripted at its site: page and metrics say the same."""

import html
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.client.activity import note_request, note_unapproved
from perennial.client.consent import pause, resume
from perennial.deploy.handshake import (
    CERTIFICATE_EXPIRED,
    CLOCK,
    CONNECTED,
    REVOKED,
    SET_CLOCK,
    UNREGISTERED,
    Unreachable,
)
from perennial.deploy.supernode import ALIVE, ANSWERED
from perennial.foundation.errors import PolicyRefusal, PrivacyError, ProtocolError, StateError
from perennial.foundation.heartbeat import keep_beating, renew
from perennial.live import site_state
from perennial.live.diagnosis import of_site
from perennial.live.hospital import HospitalPages, format_site_metrics
from perennial.live.site_state import ANSWERED_WITHIN
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.server.faults import KINDS
from tests.live_pages import room_for

RUN = "ab" * 16
CALM = "Nothing needs attention."


class Site:
    """One hospital's folder, with a SuperNode that lives and is answered."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.state_dir = folder, stack, folder / "state"
        self.content: dict[str, Any] = {
            "site": "linz",
            "state_dir": "state",
            "policy": {"max_epsilon": 8.0, "require_privacy": "sample"},
            "connection": {"superlink": "127.0.0.1:1", "runtime_port": 9094},
        }
        self.alive, self.answered, self.free = True, True, 1e12
        self.obstacle: Exception | None = None
        self.state_dir.mkdir()
        self.write()

    def write(self, **changes: Any) -> None:
        for key, value in changes.items():
            self.content[key] = {**self.content.get(key, {}), **value}
        (self.folder / "site.yaml").write_text(yaml.safe_dump(self.content))

    def asked(self, error: Exception | None = None) -> None:
        """A request, and its answer or what came in its place."""
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(pytest.raises(type(error)))
            with note_request(self.state_dir, "train", run=RUN, name="skin", round=1):
                if error is not None:
                    raise error

    def charge(self, times: int) -> None:
        kind = {"recipient": "server", "kind": "update", "unit": "sample", "relation": "add_remove"}
        noise = {"mechanism": "gaussian", "noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 20}
        for _ in range(times):
            Ledger(self.state_dir).charge(Entry(run=RUN, experiment="e" * 64, **kind, **noise))  # type: ignore[arg-type]

    def unconnected(self, error: Exception | None) -> None:
        self.answered, self.obstacle = False, error

    def connected(self) -> None:
        self.alive = self.answered = True
        self.obstacle = None


@dataclass
class State:
    """script: what leads to a fault. ended: what its command leads to; None: the fault stays."""

    script: Callable[[Site], object]
    ended: Callable[[Site], object] | None
    others: tuple[str, ...] = ()


def refused(error: Exception) -> State:
    return State(lambda site: site.asked(error), lambda site: site.asked())


def obstacle(words: str, kind: type[StateError] = StateError) -> State:
    return State(
        lambda site: site.unconnected(kind(f"fl.example.org:9092: {words}")), lambda site: site.connected()
    )


def give(**facts: Any) -> Callable[[Site], object]:
    return lambda site: vars(site).update(facts)


def damage_ledger(site: Site) -> None:
    site.charge(2)
    (site.state_dir / "ledger.jsonl").rename(site.folder / "ledger")
    (site.state_dir / "ledger.jsonl").mkdir()


def cut_ledger(site: Site) -> None:
    site.charge(3)
    path = site.state_dir / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))


def take_port(site: Site) -> None:
    taken = site.stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    site.write(connection={"runtime_port": taken.getsockname()[1]})
    site.alive = False


def offer(site: Site) -> None:
    (site.folder / "offered").mkdir()
    (site.folder / "offered" / "skin.0123abcd.fab").write_bytes(b"")


def approve_unapproved(site: Site) -> None:
    folder = site.folder / "approvals"
    folder.mkdir()
    record = {"name": "x", "app": "x", "bundle": "c" * 64, "experiment": "e" * 64, "time": "", "settings": {}}
    (folder / f"{'e' * 64}.json").write_text(json.dumps(record))


BUDGET = "policy.max_epsilon: the update for server would bring this site's lifetime epsilon to 9"
STATES: dict[str, State] = {
    "certificate_expired": obstacle(CERTIFICATE_EXPIRED),
    "not_approved": State(lambda site: note_unapproved(site.state_dir, "c" * 64), None),
    "other_code": refused(ProtocolError("experiment: found another one than was approved")),
    "version": refused(ProtocolError("version: found 2, allowed 1")),
    "revoked": obstacle(REVOKED),
    "unregistered": obstacle(UNREGISTERED),
    "silent": State(give(alive=False), give(alive=True)),
    "policy": refused(PolicyRefusal("policy.answers: 'train' is not answered here")),
    "site_paused": State(lambda site: pause(site.state_dir), lambda site: resume(site.state_dir)),
    "withdrawn": State(
        lambda site: site.asked(PolicyRefusal("this site has withdrawn from this run (today)")), None
    ),
    "budget": refused(PrivacyError(BUDGET)),
    "budget_low": State(
        lambda site: [site.charge(10), site.write(policy={"max_epsilon": _spent(site) / 0.9})],
        lambda site: site.write(policy={"max_epsilon": 100.0}),
    ),
    "offer": State(offer, lambda site: next((site.folder / "offered").glob("*.fab")).unlink()),
    "settings": State(
        lambda site: (site.state_dir / "withdrawn.json").write_text("["),
        lambda site: (site.state_dir / "withdrawn.json").unlink(),
    ),
    "ledger_unreadable": State(damage_ledger, None),
    "ledger_behind": State(cut_ledger, lambda site: Ledger(site.state_dir).restart()),
    "site_disk_full": State(give(free=1e6), give(free=1e12)),
    "site_disk_low": State(give(free=1e9), give(free=1e12)),
    "site_error": refused(StateError("exemplars: chosen under another class order")),
    "site_port": State(take_port, give(alive=True), ("silent",)),
    "network": obstacle("no connection (Connection refused)", Unreachable),
    "clock": obstacle(CLOCK),
    "key_in_use": obstacle(CONNECTED),
    "not_let_in": obstacle("answers, but not with TLS; is it the SuperLink's Fleet port?"),
    "unanswered": State(lambda site: site.unconnected(None), lambda site: site.connected()),
}


def _spent(site: Site) -> float:
    return Ledger(site.state_dir).cost(1e-5, "rdp", "sample").epsilon


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with ExitStack() as stack:
        made = Site(tmp_path, stack)

        def check(*_: Any, **__: Any) -> None:
            if made.obstacle is not None:
                raise made.obstacle

        # real SuperLinks answer in tests/deploy
        monkeypatch.setattr(site_state, "check_admission", check)
        monkeypatch.setattr(site_state, "read_node_key", lambda path: None)
        yield made


class Surfaces:
    """What the hospital's page and metrics say."""

    def __init__(self, site: Site) -> None:
        renew(site.state_dir / ANSWERED)
        if not site.answered:
            old = time.time() - ANSWERED_WITHIN - 1
            os.utime(site.state_dir / ANSWERED, (old, old))
        with room_for(site.free), ExitStack() as stack:
            if site.alive:
                stack.enter_context(keep_beating(site.state_dir / ALIVE))
            pages = HospitalPages(site.folder / "site.yaml")
            self.page = html.unescape(pages.draw())
            self.faults = of_site(pages.state)
            self.metrics = format_site_metrics(pages.state).decode()


@pytest.mark.parametrize("kind", STATES)
def test_a_hospitals_surfaces_name_the_same_cause_owner_and_command(site: Site, kind: str) -> None:
    state = STATES[kind]
    state.script(site)
    seen = Surfaces(site)
    assert sorted(fault.kind for fault in seen.faults) == sorted([kind, *state.others])
    (fault,) = [fault for fault in seen.faults if fault.kind == kind]
    assert fault.owner == KINDS[kind].owner and "{" not in fault.cause + fault.command
    assert f"<strong>{fault.cause}" in seen.page and fault.turn in seen.page and CALM not in seen.page
    (labels,) = re.findall(rf'^perennial_fault\{{(.*kind="{kind}".*)\}} 1\.0$', seen.metrics, re.MULTILINE)
    assert f'cause="{fault.cause}"' in labels and f'command="{fault.command}"' in labels
    if state.ended is not None:
        state.ended(site)
        assert kind not in [fault.kind for fault in Surfaces(site).faults]


def test_where_nothing_is_wrong_the_page_says_so(site: Site) -> None:
    calm = Surfaces(site)
    assert CALM in calm.page and "perennial_fault{" not in calm.metrics


def test_a_clock_that_the_handshake_notices_is_the_same_fault(site: Site) -> None:
    site.unconnected(StateError(f"ca.crt: valid from tomorrow{SET_CLOCK}"))
    assert [fault.kind for fault in Surfaces(site).faults] == ["clock"]
