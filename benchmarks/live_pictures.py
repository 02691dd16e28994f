"""The pictures of both live pages in README.md, of a run and a hospital that are made up.

    python -m benchmarks.live_pictures     writes docs/live_operator.png and docs/live_hospital.png

It needs Debian's packages chromium and chromium-driver.
"""

import json
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from starlette.types import ASGIApp

from benchmarks.live_pages import browser
from perennial.client.activity import noted
from perennial.config.approval import Approval
from perennial.config.experiment import load_experiment
from perennial.deploy.supernode_process import ALIVE as SUPERNODE
from perennial.deploy.supernode_process import ANSWERED
from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.heartbeat import beating
from perennial.live.guard import Sessions, allowed_hosts
from perennial.live.hospital import HospitalPages
from perennial.live.operator import OperatorPages
from perennial.live.serving import web_server
from perennial.privacy import ledger
from perennial.privacy.entries import Entry
from perennial.server.app import ALIVE
from perennial.server.journal import Journal
from perennial.server.live_status import LiveStatusFile

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAME, RUN, TOKEN = "skin-lesions-2026", "5e" * 16, "a-word-for-pictures-only"
SITES = ["bregenz", "graz", "innsbruck", "klagenfurt", "leoben", "linz", "salzburg", "st-pölten", "villach"]
ROUNDS, TASKS, NOW = 24, 3, 22
CLASSES = [["melanoma", "naevus"], ["keratosis", "basal cell"], ["dermatofibroma", "vascular"]]
PICTURE: dict[str, Any] = {"width": 1200, "height": 1760, "deviceScaleFactor": 0.75, "mobile": False}
EXPERIMENT = {
    "name": NAME,
    "data": {
        "source": "folder",
        "classes": [name for task in CLASSES for name in task],
        "image_size": 64,
        "color": "rgb",
    }
    | {"normalise": {"mean": [0.5] * 3, "std": [0.25] * 3}},
    "tasks": {"count": TASKS, "rounds": ROUNDS // TASKS},
    "model": {"name": "small_cnn"},
    "evaluation": {"noise_multiplier": 2.0},
    "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.1}
    | {"sample_rate": 0.02, "delta": 1.0e-5},
}
SITE = """
site: graz
state_dir: state
policy: {answers: [train, digest], require_privacy: sample, max_epsilon: 8.0, delta: 1.0e-5}
"""


def release(experiment: str) -> Entry:
    """What each site sends in a round."""
    return Entry(
        run=RUN,
        experiment=experiment,
        recipient="server",
        kind="update",
        unit="sample",
        relation="add_remove",
        mechanism="gaussian",
        noise_multiplier=1.1,
        sample_rate=0.02,
        steps=20,
    )


def accuracy(task: int, age: int, progress: float) -> float:
    """Of a task so many tasks after its own, so far through the newest one."""
    return (0.91 - 0.03 * task) * (1 - 0.05 * age) * (1 if age else 0.7 + 0.3 * math.sqrt(progress))


def write_run(folder: Path) -> LiveStatusFile:
    """A run of NOW rounds, in the last of which some sites have answered."""
    folder.mkdir()
    (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT, allow_unicode=True), encoding="utf-8")
    entry = release(load_experiment(folder / "experiment.yaml").digest).to_json()
    journal = Journal(folder)
    journal.write("run_started", experiment=NAME, seed=1, engine="grpc", device="cpu")
    journal.write("sites", connected=SITES, missing=[])
    releases = (folder / "releases.jsonl").open("w", encoding="utf-8")
    each = ROUNDS // TASKS
    for number in range(1, NOW):
        task, within = (number - 1) // each + 1, (number - 1) % each + 1
        if within == 1:
            journal.write("task_started", task=task, classes=CLASSES[task - 1])
        gone = ["leoben"] if number in (5, 17) else []
        refused = ["villach"] if number > 15 else []
        there = [site for site in SITES if site not in gone + refused]
        now = [accuracy(one, task - one, within / each) for one in range(1, task + 1)]
        journal.write(
            "round",
            task=task,
            round=number,
            participants=[] if number == 9 else there,
            dropped=[{"site": site, "reason": "no answer within 10 min"} for site in gone],
            refused=[
                {"site": site, "reason": "policy: the lifetime epsilon of 8 is spent"} for site in refused
            ],
            absent=gone,
            skipped=number == 9,
            train_loss=1 / number,
            accuracy=None if number == 9 else sum(now) / task,
            bytes_up=4 * 10**6,
            bytes_down=4 * 10**6,
            seconds=24 + number % 5,
            details={
                "weights": {site: round(0.6 + 0.1 * (index % 5), 2) for index, site in enumerate(there)}
            },
        )
        line = {"once": "", "entries": [entry], "asked": there, "refused": []}
        releases.write(json.dumps(line) + "\n")
        if within == each:
            classes = [value + sign * 0.02 for value in now for sign in (1, -1)]
            journal.write(
                "task_finished",
                task=task,
                accuracy=now,
                average_accuracy=sum(now) / task,
                class_accuracy=classes,
            )
    releases.close()
    now_file, online = LiveStatusFile(folder), [site for site in SITES if site not in ("bregenz", "leoben")]
    now_file.begin(
        task=TASKS, tasks=TASKS, round=NOW, rounds=ROUNDS, deadline=600.0, online=online, missing=["bregenz"]
    )
    now_file.write("asked", kind="train", sites=[site for site in SITES if site != "bregenz"])
    for site in ("graz", "innsbruck", "linz", "salzburg"):
        now_file.write("answered", site=site, fault="", refused=False)
    reason = "policy: the lifetime epsilon of 8 is spent"
    now_file.write("answered", site="villach", fault=reason, refused=True)
    return now_file


class Clock(datetime):
    """A clock that goes on by 25 s with each look, so that the ledger is of half an hour."""

    looks = 0

    @classmethod
    def now(cls, tz: Any = None) -> "Clock":
        cls.looks += 1
        moment = datetime.now(UTC) - timedelta(seconds=25 * (NOW - cls.looks))
        return cls.fromtimestamp(moment.timestamp(), UTC)


def write_site(folder: Path) -> Path:
    """A hospital that takes part in that run; its site.yaml."""
    path, state = folder / "site.yaml", folder / "state"
    path.write_text(SITE, encoding="utf-8")
    experiment = folder / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    loaded = load_experiment(experiment)
    (state / "runs" / RUN).mkdir(parents=True)
    (state / "runs" / RUN / "exemplars").write_bytes(b"x" * 480_000)
    setattr(ledger, "datetime", Clock)  # noqa: B010
    for _ in range(1, NOW):
        ledger.Ledger(state).charge(release(loaded.digest))
    setattr(ledger, "datetime", datetime)  # noqa: B010
    approval = Approval(
        app="perennial.perennial.0-1-0.4a742fb2",
        bundle="4a742fb2" * 8,
        experiment=loaded.digest,
        time=f"{datetime.now(UTC) - timedelta(days=20):%Y-%m-%dT08:14:00}",
        document=loaded.to_yaml(),
    )
    (folder / "approvals").mkdir()
    (folder / "approvals" / approval.name).write_text(approval.model_dump_json())
    for number in range(NOW - 4, NOW):
        with noted(state, "train", run=RUN, name=NAME, round=number):
            pass
    try:
        with noted(state, "evaluate", run=RUN, name=NAME, round=NOW - 1):
            raise PolicyRefusal(
                "policy.answers: this site does not answer 'evaluate'; it answers train, digest"
            )
    except PolicyRefusal:
        pass
    return path


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Pages on a free port of this machine; their address."""
    server = web_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def main() -> None:
    """Make both pictures."""
    hosts = allowed_hosts("127.0.0.1", [])
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as profile:
        runs, home = Path(base) / "runs", Path(base) / "graz"
        runs.mkdir()
        home.mkdir()
        write_run(runs / NAME)
        path = write_site(home)
        state = home / "state"
        operator = OperatorPages(runs, Sessions(TOKEN, "perennial", secure=False)).app(hosts)
        hospital = HospitalPages(path, Sessions(TOKEN, "perennial-site", secure=False)).app(hosts)
        driver = browser(profile, "hide-scrollbars")
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PICTURE)
        try:
            with (
                beating(runs / NAME / ALIVE),
                beating(state / SUPERNODE),
                beating(state / ANSWERED),
                noted(state, "train", run=RUN, name=NAME, round=NOW),
                served(operator) as operators,
                served(hospital) as hospitals,
            ):
                time.sleep(20)  # so that somebody has been waited for
                driver.get(f"{operators}/runs/{NAME}")
                time.sleep(2)
                driver.save_screenshot(str(DOCS / "live_operator.png"))
                driver.get(hospitals)
                field = driver.find_element("id", "token")
                field.send_keys(TOKEN)
                field.submit()
                time.sleep(3)
                driver.save_screenshot(str(DOCS / "live_hospital.png"))
                driver.get("about:blank")
                time.sleep(1)
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
