"""Kill a run at every line of its journal and after every file that it writes, resume it, and compare.

    python -m benchmarks.kills [--minutes M] [--each N] [--only WORD]
                                                   writes benchmarks/results/kills.json, .md
    python -m benchmarks.kills --sample N [--seed S]      prints N kills, and writes nothing

A process forks after the imports; the fork runs, and ends without a word (_exit) at a chosen moment: after a
line of the journal, of a ledger or of the record of releases, or after a file has taken its place. Another
fork resumes the run by `perennial run --resume`. What nothing disturbed is compared with it: task list, hash
of the model, rounds, epsilon, charges in every site's ledger. A run that was not killed and did not finish,
or whose exit status is 0 although it did not, is a failure too. The campaign goes on where it was stopped.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, versions
from benchmarks.kill_cases import Case, cases
from benchmarks.kill_page import page
from perennial.foundation.files import replace_file

RESULTS = Path(__file__).parent / "results" / "kills.json"
DEPLOYED = RESULTS.with_name("kills_deployed.json")
KILLED = 17
"""Exit status of a fork that ended at its moment."""


class Moments:
    """Counts what a run writes, and ends the process after the chosen one. kinds: of each, in order."""

    def __init__(self, last: int | None) -> None:
        self.kinds: list[str] = []
        self._last, self._process = last, os.getpid()

    def note(self, kind: str) -> None:
        # workers write for themselves; they end with the process that they work for
        if os.getpid() != self._process:
            return
        self.kinds.append(kind)
        if self._last is not None and len(self.kinds) > self._last:
            os._exit(KILLED)

    def watch(self) -> None:
        """See every line that is appended and every file that takes its place, in this process."""
        from perennial.privacy.ledger import Ledger
        from perennial.server.journal import Journal
        from perennial.server.releases import Releases

        replace = os.replace

        def replaced(source: Any, target: Any, **more: Any) -> None:
            replace(source, target, **more)
            self.note(_kind_of(Path(target)))

        os.replace = replaced
        for owner, what in ((Journal, "journal"), (Releases, "releases"), (Ledger, "ledger")):
            append = vars(owner)["_append"]

            def appended(*given: Any, _append: Any = append, _what: str = what, **more: Any) -> Any:
                done = _append(*given, **more)
                self.note(_what)
                return done

            setattr(owner, "_append", appended)  # noqa: B010


def _kind_of(path: Path) -> str:
    """A file's name without what differs from one to the next."""
    if path.parent.name == "released":
        return "kept reply"
    return path.name.split("-")[0] if "-" in path.stem else path.name


def forked(work: Callable[[Path], None], note: Path) -> int:
    """Do some work in a fork; its exit status. What it prints goes to a file beside note."""
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


def begun(case: Case, path: Path, runs: Path, last: int | None) -> Callable[[Path], None]:
    """`perennial run` from the start; the moments go to the note."""
    return _commanded([str(path), "--runs", str(runs)], case, last)


def resumed(
    case: Case, runs: Path, last: int | None = None, disturbance: Callable[[], None] | None = None
) -> Callable[[Path], None]:
    """`perennial run --resume`; the moments go to the note. disturbance: done in the fork before."""
    return _commanded(["--resume", str(runs / "run")], case, last, disturbance)


def _commanded(
    words: list[str], case: Case, last: int | None, disturbance: Callable[[], None] | None = None
) -> Callable[[Path], None]:
    def work(note: Path) -> None:
        from perennial.cli.main import app

        moments = Moments(last)
        moments.watch()
        if disturbance is not None:
            disturbance()
        app(["run", *words, "--workers", str(case.workers)], standalone_mode=False)
        note.write_text(json.dumps(moments.kinds))

    return work


def refuse_training() -> None:
    """One site of this process refuses whatever is part of training."""
    from perennial.client import site as opened
    from perennial.foundation.errors import PolicyRefusal
    from perennial.protocol.messages import EvaluateRequest, FinishTaskRequest

    open_site = opened.open_site

    def refusing(identity: Any, request: Any) -> Any:
        site = open_site(identity, request)
        if site.identity.name in DISTURBED and not isinstance(request, EvaluateRequest | FinishTaskRequest):
            raise PolicyRefusal("policy.answers: this site does not train")
        return site

    opened.open_site = refusing


def fail_training() -> None:
    """One site's app fails whenever it is to train."""
    from perennial.engine import run

    answer = run.answer

    def failing(message: Any, context: Any) -> Any:
        if message.metadata.message_type in TRAINING and context.node_config["partition-id"] == 1:
            raise RuntimeError("this app fails")
        return answer(message, context)

    run.answer = failing


DISTURBED = ("site-1", "linz")
TRAINING = ("train", "query.statistics")
DISTURBANCES = {"refused": refuse_training, "failed": fail_training}


def outcome(runs: Path) -> dict[str, Any]:
    """What is compared of a run that says it finished."""
    from perennial.privacy.ledger import Ledger

    folder = runs / "run"
    summary = json.loads((folder / "summary.json").read_text())
    epsilon = summary.get("epsilon") or {}
    sites = sorted(path for path in (folder / "sites").glob("*") if (path / "ledger.jsonl").exists())
    return {
        "tasks": summary["tasks"],
        "model": summary["model_sha256"],
        "rounds": summary["rounds"],
        "accuracy": summary["accuracy_matrix"],
        "groups": [summary["group_models_sha256"], summary["personal_models_sha256"]],
        "epsilon": epsilon.get("value"),
        "charges": {path.name: len(Ledger(path).entries()) for path in sites},
    }


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed but what belongs to its case.

    moments: of the run, then of its continuation. begun: how many of them before the continuation.
    """

    moments: list[str]
    begun: int
    outcome: dict[str, Any]


def undisturbed(case: Case, folder: Path) -> Whole:
    """Run a case to its end. Raises RuntimeError where it fails."""
    path, note, runs = case.write(folder), folder / "whole.json", folder / "whole"
    if forked(begun(case, path, runs, None), note):
        raise RuntimeError(f"{case.name}: {note.with_suffix('.log').read_text()[-1500:]}")
    moments = json.loads(note.read_text())
    if case.besides != "continued":
        return Whole(moments, len(moments), outcome(runs))
    shutil.copytree(runs, folder / "first")
    case.grow(folder)
    if forked(resumed(case, runs), note):
        raise RuntimeError(f"{case.name}: {note.with_suffix('.log').read_text()[-1500:]}")
    return Whole([*moments, *json.loads(note.read_text())], len(moments), outcome(runs))


def kill(case: Case, folder: Path, at: int, whole: Whole) -> dict[str, Any]:
    """Kill a run after its moment `at` (from 0), resume it, and say in which the two differ."""
    path, runs, note = case.write(folder), folder / f"kill-{at}", folder / f"kill-{at}.json"
    in_continuation = at >= whole.begun
    if in_continuation:
        shutil.copytree(folder / "first", runs)
        case.grow(folder)
        status = forked(resumed(case, runs, at - whole.begun), note)
    else:
        status = forked(begun(case, path, runs, at), note)
    if status != KILLED:
        return {"differs": [f"it ended with {status} before the moment"]}
    if not (runs / "run" / "experiment.yaml").exists():
        return {"differs": []} if not any(runs.rglob("ledger.jsonl")) else {"differs": ["charged too early"]}
    between, wrong = list[int](), list[str]()
    for step in _steps(case, runs, at, len(whole.moments)):
        between.append(forked(step, note))
        if between[-1] == 0 and not _finished(runs):
            wrong.append("exit status 0 of a run that did not finish")
    found: dict[str, Any] = {"between": between} if between else {}
    for grown in (False, True) if case.besides == "continued" and not in_continuation else (False,):
        if grown:
            case.grow(folder)
        status = forked(resumed(case, runs), note)
        if status:
            said = note.with_suffix(".log").read_text().strip().splitlines()[-1:]
            return {**found, "differs": [*wrong, "not resumed"], "said": "".join(said)[-300:]}
        if not _finished(runs):
            wrong.append("exit status 0 of a run that did not finish")
    now = outcome(runs)
    differs = [*wrong, *(name for name in whole.outcome if whole.outcome[name] != now[name])]
    return {**found, "differs": differs}


def _steps(case: Case, runs: Path, at: int, moments: int) -> list[Callable[[Path], None]]:
    """What comes between the kill and the resume that is to end well."""
    if case.besides in DISTURBANCES:
        return [resumed(case, runs, None, DISTURBANCES[case.besides])]
    if case.besides == "killed twice":
        return [resumed(case, runs, random.Random(f"{case.name} {at}").randrange(max(1, moments - at)))]
    return []


def _finished(runs: Path) -> bool:
    """Whether the run's own record says so, and its results are there."""
    from perennial.server.continuation import Learnt

    learnt = Learnt.of(runs / "run")
    return learnt is not None and learnt.finished and (runs / "run" / "summary.json").exists()


def campaign(minutes: float, each: int, seed: int = 1, results: Path = RESULTS, only: str = "") -> None:
    """Kill runs of all cases at `each` moments for so many minutes; go on where it was stopped.

    only: a word of the names of the cases that are tried.
    """
    done: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    kills: list[dict[str, Any]] = done.get("kills", [])
    known = {(one["case"], one["at"]) for one in kills}
    until = time.monotonic() + 60 * minutes
    for case in cases():
        enough = sum(name == case.name for name, _ in known) >= each
        if enough or only not in case.name or time.monotonic() > until:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            whole = undisturbed(case, folder)
            count = len(whole.moments)
            for at in sorted(random.Random(f"{seed} {case.name}").sample(range(count), count)[:each]):
                if (case.name, at) in known or time.monotonic() > until:
                    continue
                found = kill(case, folder, at, whole)
                kills.append({"case": case.name, "at": at, "after": whole.moments[at], **found})
            done["moments"] = {**done.get("moments", {}), case.name: count}
            done |= {"seed": seed, "machine": machine(), "versions": versions(), "kills": kills}
            write(done, results)


def write(done: dict[str, Any], results: Path = RESULTS) -> None:
    """Results and their page."""
    replace_file(results, (json.dumps(done, indent=1) + "\n").encode(), mode=0o644)
    write_page(results)


def write_page(results: Path = RESULTS) -> None:
    """The page of all results, those of kills_deployed.py among them."""
    deployed = json.loads(DEPLOYED.read_text())
    replace_file(
        results.with_suffix(".md"), page(json.loads(results.read_text()), deployed).encode(), mode=0o644
    )


def sample(count: int, seed: int) -> list[dict[str, Any]]:
    """Some kills, drawn by a seed over all cases: one a case at most."""
    draw, found = random.Random(seed), list[dict[str, Any]]()
    for case in draw.sample(cases(), count):
        with tempfile.TemporaryDirectory() as place:
            whole = undisturbed(case, Path(place))
            at = draw.randrange(len(whole.moments))
            done = kill(case, Path(place), at, whole)
            found.append({"case": case.name, "after": whole.moments[at], **done})
    return found


def prepare() -> None:
    """Import, before any fork, what a run needs."""
    import torch

    import perennial.cli.main
    import perennial.cli.run
    import perennial.client.cohort  # noqa: F401

    torch.set_num_threads(1)


def main(arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    prepare()
    if "--sample" in options:
        json.dump(sample(int(options["--sample"]), int(options.get("--seed", 0))), sys.stdout)
        return
    until = time.monotonic() + 60 * float(options.get("--minutes", 30))
    each = int(options.get("--each", 20))
    # a few of every case first, so that a campaign that is cut short has seen all of them
    for few in sorted({min(each, 5), each}):
        campaign((until - time.monotonic()) / 60, few, only=options.get("--only", ""))


if __name__ == "__main__":
    main(sys.argv[1:])
