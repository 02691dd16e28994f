"""A bad day of real processes: what is wrong is named, every round counts once, and nothing is lost."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import yaml

from perennial.foundation.heartbeat import SILENT_AFTER
from tests.live_pages import room_for, until
from tests.loopback import LOOPBACK, QuickDeployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAYS, SUFFERS = SITES = ["site-0", "site-1"]
SECONDS = 120.0
EXPERIMENT = {
    "name": "trial",
    "data": {"source": "digits", "sites": 2, "samples_limit": 100, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 1000},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 2, "quorum": 1, "deadline": 20},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}


class Cable:
    """A TCP connection between a site and the gateway. delay: seconds for each piece; cut: nothing passes."""

    def __init__(self, target: int) -> None:
        self.delay, self._cut, self._target = 0.0, False, target
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, state: bool) -> None:
        self._cut = state
        while state and self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._cut:
                near.close()
                continue
            with suppress(OSError):
                far = socket.create_connection((LOOPBACK, self._target))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(65536)) and not self._cut:
                time.sleep(self.delay)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Day:
    """A federation of two sites, one of which reaches the gateway by a cable, and its run."""

    def __init__(self, there: QuickDeployment) -> None:
        self.there = there
        there.init()
        self.cable = Cable(there.fleet)
        experiment = there.folder / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(EXPERIMENT))
        there.prepare(experiment, lambda name: {"data": None} | self._connection(name))
        there.start_sites()
        there.deploy("submit", experiment)
        self.takes_part()

    def _connection(self, name: str) -> dict[str, dict[str, str]]:
        return {"connection": {"superlink": f"localhost:{self.cable.port}"}} if name == SUFFERS else {}

    def rounds(self) -> dict[int, list[str]]:
        """Participants by round. Raises AssertionError where one counts twice, or is missing."""
        path = self.there.operator / "state" / "runs" / "trial" / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [event for line in lines if (event := json.loads(line))["event"] == "round"]
        counted = [event["round"] for event in found if not event["skipped"]]
        assert counted == list(range(1, len(counted) + 1)), counted
        return {event["round"]: event["participants"] for event in found if not event["skipped"]}

    def faults(self) -> list[tuple[str, str]]:
        status = json.loads(self.there.deploy("status", "--json"))
        return [(fault["kind"], fault["site"]) for fault in status["faults"]]

    def named(self, kind: str, site: str = "") -> None:
        """`deploy status` comes to name this fault."""
        until(lambda: time.sleep(0.5) or (kind, site) in self.faults(), SECONDS)

    def takes_part(self) -> None:
        """Both sites take part in a round that is still to come, and nobody is said to be silent."""
        before = max(self.rounds(), default=0)
        until(lambda: any(n > before and len(who) == 2 for n, who in self.rounds().items()), SECONDS)
        until(lambda: not {"silent", "superlink"} & {kind for kind, _ in self.faults()}, SECONDS)

    def goes_on(self, count: int) -> None:
        """The run has so many more rounds without the site that suffers."""
        last = max(self.rounds())
        until(lambda: max(self.rounds()) >= last + count, SECONDS)
        assert not any(SUFFERS in who for n, who in self.rounds().items() if n > last + 1)

    def charges(self) -> Counter[str]:
        """Updates in each site's ledger."""
        return Counter(
            {
                name: (self.there.folder / name / "state" / "ledger.jsonl").read_text().count('"update"')
                for name in SITES
            }
        )


@pytest.fixture(scope="module")
def day() -> Iterator[Day]:
    with room_for(1e12), ExitStack() as stack:
        there = stack.enter_context(QuickDeployment(SITES))
        if not there.pinned:
            pytest.skip("root, and nothing to bind root by permissions with")
        yield Day(there)


def test_a_slow_network_costs_nobody_a_round(day: Day) -> None:
    day.cable.delay = 0.3
    day.takes_part()
    day.cable.delay = 0.0


def test_a_cut_cable_is_named_and_the_site_comes_back_after_ten_rounds(day: Day) -> None:
    day.cable.cut(True)
    assert day.there.wait_for_end(SUFFERS, SECONDS) != 0, "not alive and deaf: its unit starts it again"
    assert "no connection" in day.there.log(SUFFERS)
    day.goes_on(10)
    day.named("silent", SUFFERS)
    day.cable.cut(False)
    day.there.start_site(SUFFERS)
    day.takes_part()


def test_a_stopped_site_is_named_and_goes_on(day: Day) -> None:
    os.killpg(day.there.process_id(SUFFERS), signal.SIGSTOP)
    try:
        day.named("silent", SUFFERS)
    finally:
        os.killpg(day.there.process_id(SUFFERS), signal.SIGCONT)
    day.takes_part()


def test_the_operators_folder_comes_back_from_a_backup(day: Day) -> None:
    there = day.there
    there.kill("superlink")
    time.sleep(SILENT_AFTER + 1)
    day.named("superlink")
    before = day.rounds()
    shutil.move(there.operator, there.folder / "lost")
    # sockets are in no backup, and every start makes them anew
    shutil.copytree(there.folder / "lost", there.operator, ignore=shutil.ignore_patterns("process"))
    there.start_superlink()
    until(lambda: "resumed as" in there.deploy("resume", "trial"), SECONDS)
    day.takes_part()
    assert {n: who for n, who in day.rounds().items() if n in before} == before
    there.deploy("stop", "trial")
    time.sleep(8)
    answered = Counter(name for who in day.rounds().values() for name in who)
    for name in SITES:
        # a round's update is charged once; one that was not waited for is charged and does not count
        assert answered[name] <= day.charges()[name] <= answered[name] + 4, (answered, day.charges())
