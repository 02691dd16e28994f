"""Do the tests notice? Changes the code in small ways, one at a time, and counts which changes fail a test.

`python -m benchmarks.mutation map` measures once which tests run which line (minutes);
`... run --count 420` tries a seeded sample of mutants of `learning/`, `strategies/`, `privacy/` and `data/`,
stratified by file, each against the fast tests that run its line; a later call goes on where one ended.
With `--seconds 3` a mutant meets the likeliest tests alone, and `--only survivors` then has the survivors
meet the others. `... report` states the share noticed with its 95 % interval; no part of it is a test.

The code is changed in a copy below `build/mutation`, never in the checkout. The copy keeps the code with
which the campaign began, and gets the tests of today when asked. Each mutant runs in a fork of one process
that has imported everything (`warm_process`), so it costs the time of its tests and little more.

mutmut 3 cannot be used: it names a mutated function by the path of its file, and our folders are packages
below another name (`learning/` is `perennial.learning`). Cosmic Ray supplies the changes; the rest is here.
"""

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.covering_tests import CoveringTests, measure
from benchmarks.environment import machine
from benchmarks.mutants import Mutant, sample
from benchmarks.mutation_page import page, tried
from benchmarks.warm_process import Change, Verdict, WarmProcess
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "mutation"
TREE, MAP, ASIDE, COMMIT = (WORK / name for name in ("mutated", "map.json", "aside", "commit"))
"""The copy that is changed, what `map` found in it, what a changed file was before, and what was copied."""
SEED, COUNT = 18, 420
BATCH = 3.0
"""Seconds of tests, by the map, that a mutant's first fork runs; each further fork runs eight times more."""

app = typer.Typer(add_completion=False)


@app.command("map")
def make_map(
    files: Annotated[list[str] | None, typer.Argument(help="of tests; default: all")] = None,
) -> None:
    """Copy the tree, and measure which fast tests run which line."""
    if not TREE.exists():
        copy_tree(TREE)
    put_back()
    measured = files or sorted(str(path.relative_to(TREE)) for path in (TREE / "tests").rglob("test_*.py"))
    measure(WarmProcess(TREE, ROOT), MAP, measured)


@app.command("run")
def run(
    count: Annotated[int, typer.Option(help="mutants in the sample")] = COUNT,
    only: Annotated[str, typer.Option(help="try those again whose key begins so, or 'survivors'")] = "",
    today: Annotated[bool, typer.Option(help="take the tests of today into the copy")] = False,
    seconds: Annotated[float, typer.Option(help="of tests that a mutant meets at most; 0: all")] = 0.0,
) -> None:
    """Try the mutants of the sample that have no result yet."""
    if not TREE.exists():
        copy_tree(TREE)
    elif today:
        copy_tree(TREE, only="tests")
    put_back()
    mutants = drawn(count)
    done = {found["key"]: found for found in lines()}
    tests = CoveringTests.read(MAP)
    warm = WarmProcess(TREE, ROOT)
    for number, mutant in enumerate(mutants, start=1):
        earlier = done.get(mutant.key)
        again = (
            earlier is not None
            and only != ""
            and (not earlier["noticed"] if only == "survivors" else mutant.key.startswith(only))
        )
        if (earlier is not None and not again) or (only and not again):
            continue
        # a survivor goes on behind the tests that it has met, unless there are new ones
        met = earlier["met"] if earlier is not None and only == "survivors" and not today else 0
        result = try_mutant(warm, mutant, tests, seconds or math.inf, met) | {"added": today}
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
    made = f"The code is that of commit {COMMIT.read_text()[:12]}; {machine()}."
    found = tried(lines(), reasons or {})
    replace_file(RESULTS / "mutation.md", page(found, len(drawn(COUNT)), made).encode(), mode=0o644)


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
    if not only:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        COMMIT.write_bytes(head.stdout)
    shared = WORK / "shared"
    if (ROOT.parent / "shared").exists() and not shared.exists():
        shared.symlink_to((ROOT.parent / "shared").resolve())


def try_mutant(
    warm: WarmProcess, mutant: Mutant, tests: CoveringTests, seconds: float, met: int
) -> dict[str, Any]:
    """The result of one mutant: noticed or not, how, by which test.

    seconds: of the tests that it meets, at most.
    met: so many of the tests that run its line it has survived before.
    """
    if mutant.statement == 0:
        chosen = tests.at_import(mutant.file, TREE)
    else:
        chosen = tests.of(mutant.file, mutant.statement, mutant.line)
    started = time.monotonic()
    verdict = Verdict("survived" if chosen else "uncovered")
    with changed(mutant) as change:
        for batch in batches(chosen[met:], tests, seconds):
            met += len(batch)
            verdict = warm.pytest(batch, sum(tests.seconds.get(test, 1.0) for test in batch), change)
            if verdict.how != "survived":
                break
    return {
        "key": mutant.key,
        **mutant.facts(),
        "noticed": verdict.how == "failed",
        "how": verdict.how,
        "by": verdict.by,
        "tests": len(chosen),
        "met": met,
        "seconds": round(time.monotonic() - started, 1),
    }


def batches(chosen: Sequence[str], tests: CoveringTests, seconds: float) -> Iterator[Sequence[str]]:
    """The tests in their order, as many as fit into a number of seconds; few at first, then more."""
    rest, limit = list(chosen), min(BATCH, seconds)
    while rest and seconds > 0:
        spent, batch = 0.0, []
        while rest and (not batch or spent + tests.seconds.get(rest[0], 1.0) <= limit):
            spent += tests.seconds.get(rest[0], 1.0)
            batch.append(rest.pop(0))
        yield batch
        seconds -= max(spent, limit)
        limit = min(8 * limit, seconds)


@contextlib.contextmanager
def changed(mutant: Mutant) -> Iterator[Change]:
    """The tree with one file changed, and as it was afterwards, to the time stamp."""
    path = TREE / mutant.file
    change = Change(path, path.read_text(), mutant.source(TREE))
    ASIDE.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, ASIDE / "content")
    (ASIDE / "path").write_text(mutant.file)
    try:
        path.write_text(change.after)
        yield change
    finally:
        put_back()


def put_back() -> None:
    """Undo the change in the tree, also one that a program left which was killed."""
    if (ASIDE / "path").exists():
        shutil.copy2(ASIDE / "content", TREE / (ASIDE / "path").read_text())
        (ASIDE / "path").unlink()


def lines() -> list[dict[str, Any]]:
    """All results so far, in the order in which they came."""
    path = RESULTS / "mutation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(result: dict[str, Any]) -> None:
    """One line more, on disk before the next mutant is tried."""
    with (RESULTS / "mutation.jsonl").open("a") as out:
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    app()
