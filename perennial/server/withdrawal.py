"""Withdraws a site, or some of its records, from a closed-form run.

Sums are exact, so after a subtraction they have the bits that they would have had if the site had never taken
part. A subtraction does not undo models that were handed out before, nor what the difference of two models
reveals of what was subtracted.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perennial.client.consent import withdraw as leave
from perennial.foundation.errors import StateError
from perennial.foundation.files import hold_folder, replace_file
from perennial.learning.analytic.statistics import Statistics, read_by_task
from perennial.models.saved import GLOBAL_MODEL
from perennial.privacy.signed_sums import Statement
from perennial.server.opened_run import OpenedRun, forget_own_heads, write_own_heads
from perennial.server.report.card import CARD
from perennial.server.report.write import REPORT, write_report
from perennial.server.run_folder import CHECKPOINT
from perennial.server.run_record import read_run
from perennial.server.verification import write_statements
from perennial.strategies.analytic.kept import FOLDER, find_files

HOLDS_MODELS = {".safetensors", ".onnx", ".pt", ".html", Path(CARD).suffix}


@contextmanager
def _hold_run(folder: Path) -> Iterator[None]:
    """Hold a run's folder. Any other is left as it is: the lock in it would make a run's folder of it."""
    if not (folder / "experiment.yaml").is_file():
        raise StateError(f"{folder}: no run to withdraw from here (experiment.yaml is missing)")
    with hold_folder(folder, "withdraw"):
        yield


def withdraw(folder: Path, site: str, shrinkage: float | None = None) -> Path | None:
    """Take a site's sums out of a run, solve anew, and write whose sums are left; returns that file.

    Returns None if samples of all sites chose or weighed the head: the run is then left without a model, and
    when it is resumed it asks the remaining sites again (until_resumed). shrinkage: of the new head; None:
    the experiment's own, or chosen again from the sums. Raises StateError or ConfigError saying why it cannot
    be done; a command that was stopped is completed by giving it again.
    """
    with _hold_run(folder):
        run = OpenedRun.open(folder, unfinished=True)
        run.require_features_of_nobody()
        strategy = run.strategy
        again, gone = strategy.settings.needs_asking_again(shrinkage), site in strategy.withdrawn
        if again and not gone and run.model is None:
            raise StateError(f"{folder}: samples of all sites choose its head; finish it, then withdraw")
        if not again:
            # they are written last: where that is refused, nothing may have been changed before
            run.list_statements()
        if not gone:
            strategy.withdrawn[site] = _subtract_site(run, site)
        if again:
            if not gone:
                run.begin_again()
            if not run.checkpoint.progress.finished:
                _remove_what_it_made(run, site)
            return None
        head, used = run.head(shrinkage)
        strategy.chosen[max(strategy.chosen, default=1)] = used
        if run.model is None:
            run.commit_unfinished(head, used)
        else:
            forget_own_heads(folder)
            run.commit(head)
            if run.experiment.has_own_heads:
                write_own_heads(folder, tuple(strategy.withdrawn))
        for path in find_files(folder / FOLDER, site):
            path.unlink()
        statements = write_statements(run, used)
        if run.model is not None:
            write_report(folder)
        return statements


def describe_next_steps(folder: Path, site: str) -> Iterator[str]:
    """Yield lines on what is to be done after a withdrawal that leaves the run without a model."""
    run = OpenedRun.open(folder, unfinished=True)
    if run.model is not None:
        yield f"{site} was withdrawn before, and the other sites have chosen again: nothing was changed"
        return
    yield f"{site} is out of {folder}; its model, which samples of all sites chose or weighed, is removed"
    left = sorted(set(read_run(folder).summary.sites) - run.strategy.withdrawn.keys())
    if len(left) < (quorum := run.experiment.rounds.quorum):
        yield f"rounds.quorum is {quorum}, and {len(left)} sites are left: begin a new run with them"
    else:
        yield f"the sites that are left are asked again by: perennial run --resume {folder}"
        yield f"of a deployment by: perennial deploy resume {folder.name}"
    for path in list_leftovers(folder):
        if not path.startswith(f"{CHECKPOINT}/"):
            yield f"{folder / path}: may still hold the old model"


def _subtract_site(run: OpenedRun, site: str) -> dict[str, Any]:
    """Take a site's sums out; returns what is kept of it.

    Raises StateError where it gave none, or where no other site did.
    """
    strategy = run.strategy
    if site not in strategy.sums.sites:
        raise StateError(f"site {site!r}: its sums are in no task of this run")
    if strategy.sums.sites == [site]:
        raise StateError(f"{run.folder}: {site} is the only site; without it there is no model")
    if strategy.head == "balanced_ridge":
        return {"number": _find_next_number(run)}
    sums, before = strategy.kept_sums, run.total.sha256
    return _describe_withdrawal(run, before, sums.take_back(site))


def _remove_what_it_made(run: OpenedRun, site: str) -> None:
    """Remove a site's sums, every head, and of a simulated site what it keeps, so that it answers no more."""
    folder, sums = run.folder, run.strategy.sums
    if (folder / "sites" / site / "runs" / run.run).exists():
        leave(folder / "sites" / site, run.run)
    # sums of chosen maps are all asked for anew
    own = find_files(folder / FOLDER, site) if sums.sites else folder.glob(f"{FOLDER}/*-task-*.safetensors")
    for path in (folder / GLOBAL_MODEL, *folder.glob(f"{CHECKPOINT}/previous-*"), *own):
        path.unlink(missing_ok=True)


def write_form(folder: Path, site: str, path: Path) -> Path:
    """Write the file that a site needs to take records back from a finished run; returns path.

    It has the key that divided the site's data, which the site does not keep. Raises StateError if the
    site's sums are in no task.
    """
    run = OpenedRun.open(folder)
    run.require_certifiable()
    if not run.strategy.kept_sums.list_contributions(site):
        raise StateError(f"site {site!r}: its sums are in no task of this run")
    key = run.checkpoint.progress.split_key
    content = {"run": run.run, "experiment": run.experiment.digest, "split_key": key}
    content |= {"statements": run.list_current_hashes(site)}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def withdraw_records(folder: Path, site: str, group: Path, shrinkage: float | None = None) -> Path:
    """Take a group of a site's records out of a finished run; otherwise as withdraw.

    group: the file that the site wrote with `perennial site withdraw`.
    """
    with _hold_run(folder):
        run = OpenedRun.open(folder)
        run.require_features_of_nobody()
        sums, strategy = run.strategy.kept_sums, run.strategy
        by_task, facts = read_by_task(group)
        expected = {
            "run": run.run,
            "experiment": run.experiment.digest,
            "site": site,
            "features": run.features,
        }
        for key, value in expected.items():
            if facts.get(key) != value:
                raise StateError(f"{group}: {key}: found {facts.get(key)!r:.40}, allowed {value!r:.40}")
        sha256 = hashlib.sha256(group.read_bytes()).hexdigest()
        if sha256 not in strategy.groups:
            before, remaining = run.total.sha256, sums.subtract_group(site, by_task)
            statements = _verify_statements(group, facts, remaining, run, site)
            subtracted = _add_up(by_task.values())
            sums.replace(site, remaining, statements)
            if not run.total.samples:
                raise StateError(f"{folder}: nothing would be left, and without samples there is no model")
            strategy.groups[sha256] = _describe_withdrawal(run, before, subtracted) | {"site": site}
        else:
            # a command that was stopped may have left the files behind
            sums.keep_again(site, by_task)
        head, used = run.head(shrinkage)
        strategy.chosen[max(strategy.chosen, default=1)] = used
        forget_own_heads(folder)
        run.commit(head)
        sums.keep_again(site, by_task)
        if run.experiment.has_own_heads:
            # the run's data still hold the records that go: the site makes its own head itself, without them
            write_own_heads(folder, (*strategy.withdrawn, site))
        statements = write_statements(run, used)
        write_report(folder)
        return statements


def _verify_statements(
    group: Path, facts: Mapping[str, Any], remaining: Mapping[int, Statistics], run: OpenedRun, site: str
) -> dict[int, Statement]:
    """What the site signed of the sums that remain. Raises StateError where it did not."""
    try:
        signed = {s.task: s for s in map(Statement.from_json, facts["statements"])}
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{group}: without the site's statements ({error})") from error
    for task, left in remaining.items():
        former = Statement.from_json(run.strategy.kept_sums.contributions[task][site]["statement"])
        own, repeated = (
            signed.get(task),
            (
                "site",
                "key",
                "settings",
                "run",
                "class_order",
                "signers",
            ),
        )
        if own is None or not own.signed or own.supersedes != former.sha256 or not own.is_of(left.sha256):
            raise StateError(f"{group}: task {task}: no statement of {site} of the sums that remain")
        if any(getattr(own, name) != getattr(former, name) for name in repeated):
            raise StateError(f"{group}: task {task}: the statement is of another run or key")
    return signed


def _add_up(parts: Iterable[Statistics]) -> Statistics:
    total = None
    for part in parts:
        total = part if total is None else total + part
    if total is None:
        raise StateError("a group of no task; nothing is withdrawn")
    return total


def _describe_withdrawal(run: OpenedRun, before: str, subtracted: Statistics) -> dict[str, Any]:
    """What is kept of a subtraction. before: SHA-256 of the sums."""
    left = run.total.over(range(len(run.classes))).counts
    return {
        "number": _find_next_number(run),
        "sums_before": before,
        "sums_after": run.total.sha256,
        "subtracted": subtracted.sha256,
        "classes_removed": [run.classes[label] for label in subtracted.classes if not int(left[label])],
    }


def _find_next_number(run: OpenedRun) -> int:
    former = [*run.strategy.withdrawn.values(), *run.strategy.groups.values()]
    return 1 + max((record["number"] for record in former), default=0)


def list_leftovers(folder: Path) -> list[str]:
    """Files in a run's folder that may hold the model before, relative to it; the sums are left out.

    A model card is one: it says whose records the model before was of.
    """
    new = {folder / GLOBAL_MODEL, folder / REPORT}
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix in HOLDS_MODELS)
    return sorted(str(p.relative_to(folder)) for p in found if p not in new and p.parent.name != FOLDER)
