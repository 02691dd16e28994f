"""What a later Flower would break: each private name that Perennial uses, tried in an environment of its own.

    python -m benchmarks.later_flower [VERSION]

installs that version of flwr (the newest without one) beside nothing else, looks for each name, and compares
the parameters of what is called or replaced with those of the Flower that Perennial runs on. It writes
benchmarks/results/later_flower.json and .md. docs/architecture.md shows the list.
"""

import json
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.marked_blocks import with_blocks
from perennial.deploy.flower_seam import PRIVATE
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
SEAM = ROOT / "deploy" / "flower_seam.py"
PAGE = ROOT / "docs" / "architecture.md"
RESULTS = ROOT / "benchmarks" / "results" / "later_flower.json"
REPLACED = {
    "start_client_internal": (
        "_push_messages",
        "_pull_and_store_message",
        "_insert_message",
        "_init_connection",
    ),
    "fleet_message_handler": ("pull_messages", "activate_node"),
    "superlink_module": ("SuperLinkLifespan.startup",),
    "subprocess_executor": ("SubprocessExecutor.launch",),
    "supernode_heartbeat": ("HeartbeatSender._heartbeat",),
    "run_clientapp_module": ("run_clientapp", "pull_and_inflate_object_from_tree", "install_from_fab"),
    "http_grid": ("pull_objects",),
}
"""Of private modules: what Perennial calls in them or puts another function in place of."""
# run by the other Python, which has Flower and nothing of Perennial
LOOK = """
import inspect, json, runpy, sys
from functools import reduce
seam = runpy.run_path(sys.argv[1])
found = {}
def note(name, get):
    try:
        thing = get()
    except Exception as error:
        found[name] = f"gone: {type(error).__name__}"
        return
    try:
        found[name] = [p for p in inspect.signature(thing).parameters] if callable(thing) else []
    except (TypeError, ValueError):
        found[name] = []
for name in seam["PRIVATE"]:
    note(name, lambda: seam["__getattr__"](name))
for module, parts in json.loads(sys.argv[2]).items():
    for part in parts:
        note(f"{module}.{part}", lambda: reduce(getattr, part.split("."), seam["__getattr__"](module)))
print(json.dumps(found))
"""


def look(python: str) -> dict[str, str | list[str]]:
    """By name: its parameters in the Flower of an interpreter, or why it is not there."""
    command = [python, "-W", "ignore", "-c", LOOK, str(SEAM), json.dumps(REPLACED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir())
    return json.loads(done.stdout.splitlines()[-1])


def compare(here: dict[str, Any], there: dict[str, Any]) -> dict[str, str]:
    """By name: what is different there."""
    found = {}
    for name, parameters in here.items():
        other = there[name]
        if isinstance(other, str):
            found[name] = other
        elif other != parameters:
            less, more = set(parameters) - set(other), set(other) - set(parameters)
            words = [f"without {', '.join(sorted(less))}"] * bool(less)
            words += [f"with {', '.join(sorted(more))}"] * bool(more)
            found[name] = "; ".join(words) or "other order of parameters"
    return found


def measure(wanted: str = "") -> dict[str, Any]:
    """Install a later Flower and compare."""
    with tempfile.TemporaryDirectory(prefix="later-flower-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        package = f"flwr=={wanted}" if wanted else "flwr"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"flwr": wanted or "the newest", "installs": False, "why": done.stderr.strip()[-300:]}
        ask = [python, "-c", "from importlib.metadata import version; print(version('flwr'))"]
        found = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        here, there = look(sys.executable), look(python)
    different = compare(here, there)
    return {"flwr": found, "here": version("flwr"), "installs": True, "names": len(here), "breaks": different}


def as_markdown(found: dict[str, Any]) -> str:
    """The list, with what each name is for and what would replace it."""
    if not found["installs"]:
        return f"Flower {found['flwr']} does not install here: {found['why']}\n"
    same = found["names"] - len(found["breaks"])
    lines = [
        f"Tried with Flower {found['flwr']} in an environment of its own: {same} of "
        f"{found['names']} names are as in {found['here']}.",
        "",
        "| name | there | what it is for | what would replace it |",
        "| --- | --- | --- | --- |",
    ]
    for name, words in found["breaks"].items():
        private = PRIVATE[name.partition(".")[0]]
        lines.append(f"| `{name}` | {words} | {private.purpose} | {private.successor} |")
    return "\n".join(lines) + "\n"


def rendered(page: str) -> str:
    """The page with the committed list."""
    return with_blocks(page, {"later flower": as_markdown(json.loads(RESULTS.read_text(encoding="utf-8")))})


def main() -> None:
    """Try it, and write down what was found."""
    found = measure(*sys.argv[1:2])
    replace_file(RESULTS, (json.dumps(found, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), as_markdown(found).encode(), mode=0o644)
    replace_file(PAGE, rendered(PAGE.read_text(encoding="utf-8")).encode(), mode=0o644)
    print(as_markdown(found))


if __name__ == "__main__":
    main()
