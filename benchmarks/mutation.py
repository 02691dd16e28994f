"""Do the tests notice? Changes the code in small ways, one at a time, and counts which changes fail a test.

`python -m perennial.benchmarks.mutation map` measures once which tests run which line (minutes);
`... run --count 420` tries a seeded sample of mutants of `learning/`, `strategies/`, `privacy/` and `data/`,
stratified by file, each against the fast tests that run its line; a later call goes on where one stopped.
`... report` states the share noticed with its 95 % interval. None of it is part of the tests.

The code is changed in a copy below `build/mutation`, never in the checkout. The copy keeps the code with
which the campaign began, and gets the tests of today when asked. Each mutant runs in a process forked from
one that has imported the libraries but nothing of ours, so it costs the time of its tests and little more.

mutmut 3 cannot be used: it names a mutated function by the path of its file, and our folders are packages
below another name (`learning/` is `perennial.learning`). Cosmic Ray supplies the changes; the rest is here.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from perennial.benchmarks.covering_tests import CoveringTests, measure
from perennial.benchmarks.mutants import ROOMS, Mutant, sample
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "mutation"
TREE, MAP, ASIDE = WORK / "mutated", WORK / "map.json", WORK / "aside"
"""The copy that is changed, and what `map` found in a copy of its own."""
SEED, COUNT = 18, 420
LIBRARIES = (
    "torch",
    "flwr.app",
    "flwr.serverapp",
    "flwr.clientapp",
    "pytest",
    "hypothesis",
    "pydantic",
    "yaml",
)
LIBRARIES += ("sklearn.datasets", "safetensors.torch", "scipy.stats", "typer", "PIL.Image", "opacus")
FIRST_SECONDS = 40.0
"""Seconds of tests that a mutant meets at first; who survives meets all the others too."""
PATIENCE = 8.0
"""A mutant whose tests take this many times the usual processor time, and a minute, is noticed: it hangs."""
STANDSTILL = 1800.0
"""Seconds by the clock after which a mutant hangs that takes no processor time; a busy machine is no hang."""

app = typer.Typer(add_completion=False)


@app.command("map")
def make_map(
    files: Annotated[list[str] | None, typer.Argument(help="of tests; default: all")] = None,
) -> None:
    """Copy the tree, and measure which fast tests run which line."""
    tree = WORK / "measured"
    copy_tree(tree)
    measure(tree, MAP, files or sorted(f"tests/{path.name}" for path in (tree / "tests").glob("test_*.py")))


@app.command("run")
def run(
    count: Annotated[int, typer.Option(help="mutants in the sample")] = COUNT,
    only: Annotated[str, typer.Option(help="try those again whose key begins so, or 'survivors'")] = "",
    today: Annotated[bool, typer.Option(help="take the tests of today into the copy")] = False,
    covered: Annotated[bool, typer.Option(help="leave mutants that no test runs for a later call")] = False,
) -> None:
    """Try the mutants of the sample that have no result yet."""
    if not TREE.exists():
        copy_tree(TREE)
    elif today:
        copy_tree(TREE, only="tests")
    put_back()
    mutants = drawn(count)
    done = results()
    load_libraries()
    for number, mutant in enumerate(mutants, start=1):
        earlier = done.get(mutant.key)
        again = (
            earlier is not None
            and only != ""
            and (not earlier["noticed"] if only == "survivors" else mutant.key.startswith(only))
        )
        if (earlier is not None and not again) or (only and not again):
            continue
        tests = CoveringTests.read(MAP)
        if covered and not tests.of(mutant.file, mutant.statement, mutant.line):
            continue
        result = try_mutant(mutant, tests)
        done[mutant.key] = result
        append(result)
        print(
            f"{number}/{len(mutants)} {result['how']:9s} {result['seconds']:6.1f} s {mutant.key}", flush=True
        )


@app.command("report")
def report() -> None:
    """Write the page beside the results."""
    notes = RESULTS / "mutation_survivors.yaml"
    reasons = yaml.safe_load(notes.read_text()) if notes.exists() else {}
    replace_file(RESULTS / "mutation.md", page(list(results().values()), reasons).encode())


def drawn(count: int) -> list[Mutant]:
    """The sample, which takes a minute to draw, so it is kept beside the tree that it is of."""
    path = WORK / f"sample-{count}-{SEED}.json"
    if not path.exists():
        found = [mutant.facts() for mutant in sample(TREE, count, SEED)]
        replace_file(path, json.dumps(found).encode())
    return [Mutant(**facts) for facts in json.loads(path.read_text())]


def copy_tree(to: Path, only: str = "") -> None:
    """Copy the files that git knows or would add. only: those of one folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", *filter(None, [only])],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    shutil.rmtree(to / only, ignore_errors=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file() or source.is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)
    shared = WORK / "shared"
    if (ROOT.parent / "shared").exists() and not shared.exists():
        shared.symlink_to((ROOT.parent / "shared").resolve())


def load_libraries() -> None:
    """Import what all tests import, and nothing of ours that could be changed: forks then need not."""
    import torch

    torch.set_num_threads(1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def try_mutant(mutant: Mutant, tests: CoveringTests) -> dict[str, Any]:
    """The result of one mutant: noticed or not, how, by which test."""
    chosen = tests.of(mutant.file, mutant.statement, mutant.line)
    started = time.monotonic()
    how, by = "uncovered", ""
    with changed(mutant):
        for batch in in_two(chosen, tests):
            how, by = run_tests(batch, sum(tests.seconds.get(test, 1.0) for test in batch))
            if how != "survived":
                break
    return {
        "key": mutant.key,
        **mutant.facts(),
        "noticed": how in ("failed", "hung"),
        "how": how,
        "by": by,
        "tests": len(chosen),
        "seconds": round(time.monotonic() - started, 1),
    }


def in_two(chosen: Sequence[str], tests: CoveringTests) -> Iterator[Sequence[str]]:
    """The likeliest tests, as many as FIRST_SECONDS hold, then the others."""
    spent, cut = 0.0, len(chosen)
    for index, test in enumerate(chosen):
        spent += tests.seconds.get(test, 1.0)
        if spent > FIRST_SECONDS and index:
            cut = index
            break
    if cut:
        yield chosen[:cut]
    if cut < len(chosen):
        yield chosen[cut:]


@contextlib.contextmanager
def changed(mutant: Mutant) -> Iterator[None]:
    """The tree with one file changed, and as it was afterwards, to the time stamp."""
    path = TREE / mutant.file
    text = mutant.source(TREE)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    ASIDE.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, ASIDE / "content")
    (ASIDE / "path").write_text(mutant.file)
    try:
        path.write_text(text)
        yield
    finally:
        put_back()


def put_back() -> None:
    """Undo the change in the tree, also one that a program left which was killed."""
    if (ASIDE / "path").exists():
        shutil.copy2(ASIDE / "content", TREE / (ASIDE / "path").read_text())
        (ASIDE / "path").unlink()


def run_tests(tests: Sequence[str], usual: float) -> tuple[str, str]:
    """(how, first test that failed) of one pytest run in a forked process."""
    verdict = WORK / "verdict.json"
    verdict.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        seconds = int(60 + PATIENCE * usual)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
        _be_pytest(tests, verdict)
    limit = time.monotonic() + STANDSTILL
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
                return "hung", ""
            break
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung", ""
        time.sleep(0.05)
    if not verdict.exists():
        return "failed", "the process ended"
    found = json.loads(verdict.read_text())
    return ("survived" if found["code"] == 0 else "failed"), found["by"]


def _be_pytest(tests: Sequence[str], verdict: Path) -> None:
    """The forked child: run pytest in the copy, write down what came out, and end."""
    import pytest

    class First:
        """Remembers the first test that failed."""

        by = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.by:
                self.by = report.nodeid

    os.setpgid(0, 0)
    os.chdir(TREE)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    forget_our_modules()
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(TREE)
    sys.path[:] = [str(TREE), *(part for part in sys.path if Path(part or ".").resolve() != ROOT)]
    first = First()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests], [first])
    verdict.write_text(json.dumps({"code": int(code), "by": first.by}))
    os._exit(0)


def forget_our_modules() -> None:
    """Ours must be imported from the copy, whatever this program imported from the checkout."""
    for name in [name for name in sys.modules if name.split(".")[0] == "perennial"]:
        del sys.modules[name]


def results() -> dict[str, dict[str, Any]]:
    """The latest result of each mutant tried so far."""
    path = RESULTS / "mutation.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def append(result: dict[str, Any]) -> None:
    """One line more, on disk before the next mutant is tried."""
    with (RESULTS / "mutation.jsonl").open("a") as out:
        out.write(json.dumps(result) + "\n")


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share.

    Wilson 1927 (doi 10.1080/01621459.1927.10502953).
    """
    share = successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return middle - half, middle + half


def page(found: Sequence[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Markdown: the share by room, and each survivor with what is known of it."""
    lines = ["# Do the tests notice?", ""]
    if len(found) < COUNT:
        lines += [f"**Not finished: {len(found)} of about {COUNT} mutants have been tried.**", ""]
    lines += [
        f"{len(found)} mutants of the four rooms, each a small change by Cosmic Ray at one position,",
        f"drawn with seed {SEED} and stratified by file; each met the fast tests that run its line. Made by",
        "`python -m perennial.benchmarks.mutation`; one line for each in `mutation.jsonl`.",
        "",
        "| room | mutants | noticed | share | 95 % interval (Wilson) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for room in (*ROOMS, "all"):
        of_room = [one for one in found if room in ("all", one["file"].split("/")[0])]
        if of_room:
            noticed = sum(one["noticed"] for one in of_room)
            low, high = wilson(noticed, len(of_room))
            share = f"{noticed / len(of_room):.1%} | {low:.1%} to {high:.1%}"
            lines.append(f"| {room} | {len(of_room)} | {noticed} | {share} |")
    survivors = sorted((one for one in found if not one["noticed"]), key=lambda one: one["key"])
    lines += ["", "## Survivors", "", "| change | tests that ran it | what it is |", "| --- | --- | --- |"]
    lines += [
        f"| `{one['key']}` | {one['tests']} | {reasons.get(one['key'], 'not yet looked at')} |"
        for one in survivors
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
