"""Pages on a port of this machine, runs that go on, and a browser where the system has one."""

import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import pytest
from starlette.types import ASGIApp

from perennial.foundation.heartbeat import keep_beating
from perennial.live import diagnosis
from perennial.live.operator import OperatorPages
from perennial.live.web import list_allowed_hosts, make_server
from perennial.server.control import ALIVE
from perennial.server.journal import Journal
from perennial.server.live_status import LiveStatusFile
from tests.run_folders import round_event


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """An application on a free port of loopback; its address."""
    server = make_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def operator_pages(runs: Path) -> Iterator[str]:
    """The operator's pages over a folder of runs; their address."""
    pages = OperatorPages(runs)
    with served(pages.app(list_allowed_hosts("127.0.0.1", []))) as address:
        yield address


@dataclass
class Answer:
    """What a server said."""

    status: int
    body: str
    headers: dict[str, str]


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def ask(address: str, form: dict[str, str] | None = None, **headers: str) -> Answer:
    """One request; a form is posted. Redirects are not followed."""
    data = None if form is None else urlencode(form).encode()
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(address, data, found)
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=20) as reply:
            return Answer(
                reply.status, reply.read().decode(), {k.lower(): v for k, v in reply.headers.items()}
            )
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), {k.lower(): v for k, v in error.headers.items()})


class GoingOn:
    """A run whose process is this one: its journal, and the round that goes on."""

    def __init__(self, runs: Path, name: str = "trial") -> None:
        self.folder = runs / name
        self.folder.mkdir(parents=True)
        (self.folder / "experiment.yaml").write_text("name: trial\n")
        self.journal, self.now = Journal(self.folder), LiveStatusFile(self.folder)
        self.journal.write("run_started", experiment="trial", seed=1, engine="grpc", device="cpu")

    def begin_round(self, number: int, sites: list[str], rounds: int = 10, **more: Any) -> None:
        facts = {"task": 1, "tasks": 1, "deadline": 600.0, "missing": []} | more
        self.now.begin(round=number, rounds=rounds, online=sites, **facts)
        self.now.write("asked", kind="train", sites=sites)

    def answer(self, site: str, fault: str = "", *, refused: bool = False) -> None:
        self.now.write("answered", site=site, fault=fault, refused=refused)

    def end_round(self, number: int, sites: list[str], **more: Any) -> None:
        event = round_event(number, 1, participants=sites) | more
        self.journal.write(event.pop("event"), **event)

    def raw(self, line: bytes) -> None:
        """Put any bytes into the journal."""
        with (self.folder / "events.jsonl").open("ab") as file:
            file.write(line)


@contextmanager
def room_for(free: float, total: float = 1e12) -> Iterator[None]:
    """The pages see a disk with so many bytes, whatever this machine has left."""
    found = SimpleNamespace(total=total, used=total - free, free=free)
    with mock.patch.object(diagnosis, "shutil", SimpleNamespace(disk_usage=lambda _: found)):
        yield


@contextmanager
def going_on(runs: Path, name: str = "trial") -> Iterator[GoingOn]:
    """A run with a heartbeat and room on its disk."""
    run = GoingOn(runs, name)
    with room_for(1e12), keep_beating(run.folder / ALIVE):
        yield run


def until(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What check returns once it is true. Fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:.0f} s")


BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not BROWSER or not DRIVER, reason="no browser: Debian's packages chromium and chromium-driver have one"
)


@contextmanager
def browser(folder: Path, width: int = 1200, height: int = 1400) -> Iterator[Any]:
    """A headless Chromium that talks to nobody but the pages. folder: an empty one for its profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "hide-scrollbars"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        *("disable-dev-shm-usage", f"window-size={width},{height}", f"user-data-dir={folder}"),
    ):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
