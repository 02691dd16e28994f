"""Runs that are killed at moments that a seed draws, and resumed, end as runs that nobody killed.

A process forks after the imports; the fork runs, and ends without a word (_exit) after a line of the journal,
of a ledger or of the record of releases, or after a file has taken its place. Another fork resumes the run.
"""

import json
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perennial.privacy.ledger import Ledger
from tests.server.small_runs import SmallRun

KILLED = 17
"""Exit status of a fork that ended at its moment."""
RUNS = [
    SmallRun("digits", "private"),
    SmallRun("folder", "pp_fcil", workers=2),
    SmallRun("own", "replay"),
    SmallRun("table", "ring"),
    SmallRun("patients", "analytic"),
]


class Moments:
    """Counts what a run writes, and ends the process after the chosen one.

    Attributes:
        count: So many were seen.
    """

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last, self._process = last, os.getpid()

    def note(self) -> None:
        # workers write for themselves; they end with the process that they work for
        if os.getpid() != self._process:
            return
        self.count += 1
        if self._last is not None and self.count > self._last:
            os._exit(KILLED)

    def watch(self) -> None:
        """See every line that is appended and every file that takes its place, in this process."""
        from perennial.server.journal import Journal
        from perennial.server.releases import Releases

        replace = os.replace

        def replaced(source: Any, target: Any, **more: Any) -> None:
            replace(source, target, **more)
            self.note()

        os.replace = replaced
        for owner in (Journal, Releases, Ledger):
            append = vars(owner)["_append"]

            def appended(*given: Any, _append: Any = append, **more: Any) -> Any:
                done = _append(*given, **more)
                self.note()
                return done

            setattr(owner, "_append", appended)  # noqa: B010


def fork(work: Callable[[Path], None], note: Path) -> int:
    """Do some work in a fork; its exit status. What it prints goes to a file next to the note."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(note.with_suffix(".log"), "ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            work(note)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(words: list[str], workers: int, last: int | None) -> Callable[[Path], None]:
    """`perennial run`, killed after a moment; the number of its moments goes to the note."""

    def work(note: Path) -> None:
        from perennial.cli.main import app

        moments = Moments(last)
        moments.watch()
        app(["run", *words, "--workers", str(workers)], standalone_mode=False)
        note.write_text(str(moments.count))

    return work


def read_outcome(runs: Path) -> dict[str, Any]:
    """What is compared of a run that says it finished."""

    folder = runs / "run"
    summary = json.loads((folder / "summary.json").read_text())
    epsilon = summary.get("epsilon") or {}
    sites = sorted(path for path in (folder / "sites").glob("*") if (path / "ledger.jsonl").exists())
    return {
        "tasks": summary["tasks"],
        "model": summary["model_sha256"],
        "rounds": summary["rounds"],
        "accuracy": summary["accuracy_matrix"],
        "epsilon": epsilon.get("value"),
        "charges": {path.name: len(Ledger(path).read_entries()) for path in sites},
    }


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.data} {run.method}")
def test_no_kill_changes_tasks_bits_rounds_or_charges(run: SmallRun, tmp_path: Path) -> None:
    import perennial.cli.main  # noqa: F401 - before the forks

    path, note, whole = run.write(tmp_path), tmp_path / "note", tmp_path / "whole"
    assert fork(command([str(path), "--runs", str(whole)], run.workers, None), note) == 0, note.with_suffix(
        ".log"
    ).read_text()[-2000:]
    expected, moments = read_outcome(whole), int(note.read_text())
    draws = random.Random(f"{run.data} {run.method}")
    for at in draws.sample(range(moments), 3):
        runs = tmp_path / f"kill-{at}"
        assert fork(command([str(path), "--runs", str(runs)], run.workers, at), note) == KILLED
        if not (runs / "run" / "experiment.yaml").exists():
            assert not any(runs.rglob("ledger.jsonl")), "charged before the run began"
            continue
        # the first resume is killed too, and the second one ends
        resume = ["--resume", str(runs / "run")]
        fork(command(resume, run.workers, draws.randrange(moments)), note)
        assert fork(command(resume, run.workers, None), note) == 0, (at, note.with_suffix(".log").read_text())
        found = read_outcome(runs)
        if run.method == "private":
            # a reply that was charged and lost with the site's process is charged again
            assert all(found["charges"][site] >= number for site, number in expected["charges"].items())
            # and has fresh noise, so the model has other bits
            found |= {key: expected[key] for key in ("charges", "epsilon", "model", "accuracy")}
        assert found == expected, at
