"""Kill a run at every line of its journal and after every file that it writes, resume it, and compare.

    python -m perennial.benchmarks.kills [--minutes M] [--each N]   writes benchmarks/results/kills.json, .md
    python -m perennial.benchmarks.kills --sample N [--seed S]      prints N kills, and writes nothing

A process forks after the imports; the fork runs, and ends without a word (_exit) at a chosen moment: after a
line of the journal, of a ledger or of the record of releases, or after a file has taken its place. Another
fork resumes the run as `perennial run --resume` does. What nothing disturbed is compared with it: task list,
hash of the model, rounds, epsilon, charges in every site's ledger. A run that was not killed and did not
finish, or that says it finished and did not, is a failure too. The campaign goes on where it was stopped.
"""

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perennial.benchmarks.environment import machine, versions
from perennial.benchmarks.kill_cases import Case, cases
from perennial.foundation.files import replace_file

RESULTS = Path(__file__).parent / "results" / "kills.json"
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
    """Run from the start; the moments go to the note."""

    def work(note: Path) -> None:
        from perennial.config.run import RunSettings
        from perennial.engine.run import run_in_process

        moments = Moments(last)
        moments.watch()
        run_in_process(RunSettings(str(path), runs=str(runs)), workers=case.workers)
        note.write_text(json.dumps(moments.kinds))

    return work


def resumed(case: Case, runs: Path) -> Callable[[Path], None]:
    """Go on as `perennial run --resume` does; from the start where the folder has no run yet."""

    def work(note: Path) -> None:
        from perennial.engine.run import resumed_settings, run_in_process

        run_in_process(resumed_settings(None, [], None, runs / "run", "cpu"), workers=case.workers)

    return work


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


def undisturbed(case: Case, folder: Path, path: Path) -> tuple[list[str], dict[str, Any]]:
    """(the moments of a run that nothing disturbs, its outcome). Raises RuntimeError where it fails."""
    note = folder / "whole.json"
    if forked(begun(case, path, folder / "whole", None), note):
        raise RuntimeError(f"{case.name}: {note.with_suffix('.log').read_text()[-1500:]}")
    return json.loads(note.read_text()), outcome(folder / "whole")


def kill(case: Case, folder: Path, path: Path, at: int, whole: dict[str, Any]) -> dict[str, Any]:
    """Kill a run after its moment `at` (from 0), resume it, and say in which the two differ."""
    runs, note = folder / f"kill-{at}", folder / f"kill-{at}.json"
    status = forked(begun(case, path, runs, at), note)
    if status != KILLED:
        return {"differs": [f"it ended with {status} before the moment"]}
    if not (runs / "run" / "experiment.yaml").exists():
        return {"differs": []} if not any(runs.rglob("ledger.jsonl")) else {"differs": ["charged too early"]}
    status = forked(resumed(case, runs), note)
    if status:
        said = note.with_suffix(".log").read_text().strip().splitlines()[-1:]
        return {"differs": ["not resumed"], "said": "".join(said)[-300:]}
    found = outcome(runs)
    return {"differs": [name for name in whole if whole[name] != found[name]]}


def campaign(minutes: float, each: int, seed: int = 1, results: Path = RESULTS) -> None:
    """Kill runs of all cases at `each` moments for so many minutes; go on where it was stopped."""
    done: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    kills: list[dict[str, Any]] = done.get("kills", [])
    known = {(one["case"], one["at"]) for one in kills}
    until = time.monotonic() + 60 * minutes
    for case in cases():
        if sum(name == case.name for name, _ in known) >= each or time.monotonic() > until:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            path = case.write(folder)
            moments, whole = undisturbed(case, folder, path)
            chosen = random.Random(f"{seed} {case.name}").sample(range(len(moments)), len(moments))[:each]
            for at in sorted(chosen):
                if (case.name, at) in known or time.monotonic() > until:
                    continue
                found = kill(case, folder, path, at, whole)
                kills.append({"case": case.name, "at": at, "after": moments[at], **found})
            counts = {**done.get("moments", {}), case.name: len(moments)}
            done = {"seed": seed, "machine": machine(), "versions": versions(), "moments": counts}
            done["kills"] = kills
            replace_file(results, (json.dumps(done, indent=1) + "\n").encode(), mode=0o644)
            replace_file(results.with_suffix(".md"), page(done).encode(), mode=0o644)


def sample(count: int, seed: int) -> list[dict[str, Any]]:
    """Some kills, drawn by a seed over all cases: one a case at most."""
    draw, found = random.Random(seed), list[dict[str, Any]]()
    for case in draw.sample(cases(), count):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            path = case.write(folder)
            moments, whole = undisturbed(case, folder, path)
            at = draw.randrange(len(moments))
            found.append({"case": case.name, "after": moments[at], **kill(case, folder, path, at, whole)})
    return found


def page(done: dict[str, Any]) -> str:
    """The results as a page."""
    kills: list[dict[str, Any]] = done["kills"]
    clean = sum(not one["differs"] for one in kills)
    lines = [
        "# Kills",
        "",
        f"`python -m perennial.benchmarks.kills`: {len(kills)} kills, of which {clean} changed nothing.",
        "A fork ends (`_exit`) after a line of the journal, of a ledger or of the record of releases, or",
        "after a file has taken its place; another resumes the run. Compared with a run that nothing",
        "disturbed: tasks, model (SHA-256), rounds, accuracy, models of groups and sites, epsilon, and the",
        "charges in each site's ledger. `moments`: all there are in a run; those that were tried are drawn",
        "by a seed. A kill between a site's charge and its kept reply makes that site pay once more:",
        "`charges` differ there.",
        "",
        "| run | moments | kills | nothing changed | what differed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, moments in done["moments"].items():
        of = [one for one in kills if one["case"] == name]
        faults: dict[str, int] = {}
        for one in of:
            if one["differs"]:
                what = f"{', '.join(one['differs'])} after {one['after']}"
                faults[what] = faults.get(what, 0) + 1
        said = "; ".join(f"{count}: {what}" for what, count in sorted(faults.items())) or "-"
        lines.append(f"| {name} | {moments} | {len(of)} | {sum(not one['differs'] for one in of)} | {said} |")
    facts = ", ".join(f"{name} {number}" for name, number in done["versions"].items())
    lines += [
        "",
        f"Seed {done['seed']}; {facts}; {done['machine']}.",
        "In process and over two workers; none was made over gRPC here: [continuity](continuity.md) has",
        "kills of deployed processes.",
    ]
    return "\n".join(lines) + "\n"


def prepare() -> None:
    """Import, before any fork, what a run needs."""
    import torch

    import perennial.client.cohort
    import perennial.client.handlers
    import perennial.server.assembly
    import perennial.server.report.write  # noqa: F401

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
        campaign((until - time.monotonic()) / 60, few)


if __name__ == "__main__":
    main(sys.argv[1:])
