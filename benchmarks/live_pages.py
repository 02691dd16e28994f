"""What the operator's page costs with 5,000 sites and 1,000 rounds, in a browser.

`python -m benchmarks.live_pages` writes benchmarks/results/live_pages.json. It writes the journal
of such a run, starts the pages anew for each first view, and then appends events. A first view is the time
from the request until the table of sites is on the screen, of pages that have not read the journal before
(cold) and that have (warm). An event is the time from the line that a run writes until the page shows it.
"""

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, versions
from perennial.foundation.files import replace_file
from perennial.foundation.heartbeat import beating
from perennial.live.guard import Sessions, allowed_hosts
from perennial.live.operator import OperatorPages
from perennial.live.serving import web_server
from perennial.server.control import ALIVE
from perennial.server.journal import Journal
from perennial.server.live_status import LiveStatusFile

RESULTS = Path(__file__).parent / "results" / "live_pages.json"
SITES, ROUNDS, TASKS = 5000, 1000, 10
VIEWS, EVENTS = 5, 40
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-dev-shm-usage"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
)
# notes, in the page, when a text is first there; the answer is in seconds since 1970
WATCH = """
window.seen = {};
new MutationObserver(() => {
  for (const [said] of document.getElementById("notes").textContent.matchAll(/graz-\\d+(?=\\.)/g)) {
    if (!(said in window.seen)) window.seen[said] = Date.now() / 1000;
  }
}).observe(document.getElementById("notes"), {childList: true, subtree: true});
"""


def write_run(folder: Path, sites: list[str]) -> None:
    """The journal of ROUNDS rounds, in which every site but a hundredth takes part."""
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text("name: large\n", encoding="utf-8")
    journal = Journal(folder)
    journal.write("run_started", experiment="large", seed=1, engine="grpc", device="cpu")
    journal.write("sites", connected=sites, missing=[])
    each = ROUNDS // TASKS
    for number in range(1, ROUNDS + 1):
        task = (number - 1) // each + 1
        if (number - 1) % each == 0:
            journal.write("task_started", task=task, classes=[f"class {10 * task + k}" for k in range(10)])
        gone = [site for index, site in enumerate(sites) if index % 100 == number % 100]
        there = [site for index, site in enumerate(sites) if index % 100 != number % 100]
        journal.write(
            "round",
            task=task,
            round=number,
            participants=there,
            dropped=[{"site": site, "reason": "no answer within 600 s"} for site in gone[:10]],
            refused=[],
            absent=gone,
            skipped=False,
            train_loss=1 / number,
            accuracy=0.5 + number / 2500,
            bytes_up=10**9,
            bytes_down=10**9,
            seconds=30.0,
        )
        if number % each == 0:
            row = [0.9 - 0.02 * (task - index) for index in range(task)]
            classes = [row[index // 10] for index in range(10 * task)]
            journal.write(
                "task_finished",
                task=task,
                accuracy=row,
                average_accuracy=sum(row) / task,
                class_accuracy=classes,
            )
    journal.close()


def _serve(runs: Path, port: int) -> None:
    pages = OperatorPages(runs, Sessions(None, "perennial", secure=False))
    web_server(pages.app(allowed_hosts("127.0.0.1", [])), "127.0.0.1", port).run()


class Pages:
    """The pages in a process of their own, as `perennial serve` runs them."""

    def __init__(self, runs: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(runs, self.port), daemon=True
        )
        self._process.start()
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def browser(profile: str, *more: str) -> Any:
    """A headless Chromium that talks to nobody but the pages. profile: an empty folder. more: flags."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, *more, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def _view(driver: Any, port: int) -> float:
    """Seconds from the request until the page is complete."""
    driver.get("about:blank")
    began = time.perf_counter()
    driver.get(f"http://127.0.0.1:{port}/runs/large")
    rows = driver.execute_script("return document.querySelectorAll('#sites tbody tr').length")
    assert rows == 50, rows
    return time.perf_counter() - began


def measure() -> dict[str, Any]:
    """Every figure, in seconds."""
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as profile:
        folder, sites = Path(base) / "large", [f"hospital-{number}" for number in range(SITES)]
        write_run(folder, sites)
        journal_bytes = (folder / "events.jsonl").stat().st_size
        journal, now = Journal(folder, journal_bytes), LiveStatusFile(folder)
        driver = browser(profile)
        try:
            with beating(folder / ALIVE):
                now.begin(
                    task=TASKS,
                    tasks=TASKS,
                    round=ROUNDS,
                    rounds=ROUNDS + 100,
                    deadline=600.0,
                    online=sites,
                    missing=[],
                )
                now.write("asked", kind="train", sites=sites)
                cold, warm = [], []
                for _ in range(VIEWS):
                    pages = Pages(Path(base))
                    cold.append(_view(driver, pages.port))
                    warm.append(_view(driver, pages.port))
                    pages.stop()
                pages = Pages(Path(base))
                _view(driver, pages.port)
                alone = _events(driver, journal, "graz")
                # a round in which 100 sites answer in each second
                ended = threading.Event()
                thread = threading.Thread(target=_answers, args=(now, sites, ended), daemon=True)
                thread.start()
                busy = _events(driver, journal, "graz", EVENTS)
                ended.set()
                thread.join()
                pages.stop()
        finally:
            driver.quit()
    return {
        "sites": SITES,
        "rounds": ROUNDS,
        "journal_bytes": journal_bytes,
        "first_view_cold": _figures(cold),
        "first_view_warm": _figures(warm),
        "event": _figures(alone),
        "event_while_100_sites_a_second_answer": _figures(busy),
        "machine": machine(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "versions": versions(("starlette", "uvicorn", "selenium")),
    }


def _events(driver: Any, journal: Journal, name: str, start: int = 0) -> list[float]:
    driver.execute_script(WATCH)
    time.sleep(1.0)
    written = {}
    for number in range(start, start + EVENTS):
        written[f"{name}-{number}"] = time.time()
        journal.write("note", text=f"{name}-{number}.")
        time.sleep(0.35)
    time.sleep(2.0)
    seen = driver.execute_script("return window.seen")
    missed = written.keys() - seen.keys()
    assert not missed, f"{len(missed)} of {EVENTS} events were not seen"
    return [seen[key] - when for key, when in written.items()]


def _answers(now: LiveStatusFile, sites: list[str], ended: threading.Event) -> None:
    for site in sites:
        now.write("answered", site=site, fault="", refused=False)
        if ended.wait(0.01):
            return


def _figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered), 4),
        "most": round(ordered[-1], 4),
        "measured": len(ordered),
    }


if __name__ == "__main__":
    replace_file(RESULTS, (json.dumps(measure(), indent=1) + "\n").encode(), mode=0o644)
    print(RESULTS.read_text(encoding="utf-8"))
