"""How long docs/deploy.md takes on a machine that has nothing: from a checkout to a finished round.

    python -m benchmarks.first_round     writes results/first_round.json and docs/deploy.md's figure

A new checkout without an environment, a container engine that was never started, no image and no cache of
packages; then every command of the page as it is typed there (tests/containers/check_documented.py). It needs
Debian and root. What it cannot take away again is named in the results: packages of the engine that this
machine has already.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, versions
from benchmarks.marked_blocks import with_blocks
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_round.json"
PAGE = ROOT / "docs" / "deploy.md"
ENGINE = "an engine that was never started, its tools and the base image"
INSTALL = "make install"
TYPED = "typed to the end of the first round"
GOAL = 15
"""Minutes."""


class Halts:
    """When this process, and with it all that it started, was halted by whoever needs the machine."""

    LONGEST = 2.0
    """Seconds between two looks, 0.2 s apart, above which it was halted and not merely late."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            if now - before > self.LONGEST:
                self._found.append((before, now))
            before = now

    def within(self, began: float, ended: float) -> float:
        """Seconds of halts between two moments (time.monotonic)."""
        return sum(max(0.0, min(ended, end) - max(began, begin)) for begin, end in self._found)

    def step(self, what: str, began: float, ended: float) -> dict[str, Any]:
        """One step, without its halts."""
        halted = self.within(began, ended)
        return {
            "what": what,
            "seconds": round(ended - began - halted, 1),
            **({"halted": round(halted, 1)} if halted else {}),
        }


def measure(base: Path) -> dict[str, Any]:
    """Seconds of each step, and of all of them to the end of the first round, in which none was halted.

    base: an empty folder, for the checkout and the engine.
    """
    halts = Halts()
    present = shutil.which("dockerd") is not None
    checkout, times, cache = base / "perennial", base / "times.jsonl", base / "cache"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    environment = os.environ | {"PERENNIAL_CACHE": str(cache), "PIP_NO_CACHE_DIR": "1"}
    environment |= {"PERENNIAL_TIMES": str(times), "DOCKER_BUILDKIT": "1"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    engine = str(checkout / "tests" / "containers" / "engine.sh")
    try:
        steps, began = [], time.monotonic()
        up = subprocess.run(
            [engine, "up"], cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        steps.append(halts.step(ENGINE, began, time.monotonic()))
        found = dict(line.split("=", 1) for line in up.stdout.splitlines() if "=" in line)
        tools = base / "docker"
        tools.mkdir()
        (tools / "docker").symlink_to(shutil.which(found["DOCKER"]) or found["DOCKER"])
        environment |= found | {"PATH": f"{tools}:{found['TOOLS']}:{environment['PATH']}"}
        began = time.monotonic()
        subprocess.run(["make", "install"], cwd=checkout, env=environment, check=True)
        steps.append(halts.step(INSTALL, began, time.monotonic()))
        typed = [str(checkout / ".venv" / "bin" / "python"), "-m", "pytest", "--timeout", "3000", "-q"]
        typed += ["-p", "no:cacheprovider", "tests/containers/check_documented.py"]
        subprocess.run(typed, cwd=checkout, env=environment, check=True)
        noted = map(json.loads, times.read_text(encoding="utf-8").splitlines())
        steps += [halts.step(one["what"], one["began"], one["ended"]) for one in noted]
    finally:
        subprocess.run([engine, "down"], cwd=checkout, env=environment, check=False)
    seconds = {step["what"]: step["seconds"] for step in steps}
    return {
        "seconds_to_the_first_round": round(sum(seconds[step] for step in (ENGINE, INSTALL, TYPED)), 1),
        "steps": steps,
        "engine_packages_were_installed": present,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "machine": machine(),
        "versions": versions(),
    }


def in_words(found: dict[str, Any]) -> str:
    """The figure of docs/deploy.md."""
    seconds = {step["what"]: step["seconds"] for step in found["steps"]}
    images = sum(taken for what, taken in seconds.items() if what.startswith("docker build"))
    total = found["seconds_to_the_first_round"] / 60
    there = ""
    if found["engine_packages_were_installed"]:
        there = " The engine's Debian packages were there already."
    return (
        "From an empty machine to a finished round, every command typed as it stands here, took "
        f"**{total:.1f} minutes** ({'within' if total < GOAL else 'over'} the goal of {GOAL}): the engine's "
        f"first start with tools and base image {seconds[ENGINE] / 60:.1f}, `make install` "
        f"{seconds[INSTALL] / 60:.1f}, both images {images / 60:.1f}.{there} Telephone calls, reading and "
        "editing come on top. Measured by `python -m benchmarks.first_round` on "
        f"{found['machine']}, under a load of {found['load_average'][1]:g}."
    )


def rendered(page: str) -> str:
    """The page with the committed figure."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return with_blocks(page, {"first round": in_words(found)})


def main() -> None:
    """Measure, and write the figure down; only then is cleared away, which can take longer than all else."""
    with tempfile.TemporaryDirectory(prefix="perennial-first-", ignore_cleanup_errors=True) as base:
        replace_file(RESULTS, (json.dumps(measure(Path(base)), indent=1) + "\n").encode(), mode=0o644)
        replace_file(PAGE, rendered(PAGE.read_text(encoding="utf-8")).encode(), mode=0o644)


if __name__ == "__main__":
    main()
