"""Runs a table's missing runs, one after the other or in parallel, and keeps each as it is done."""

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, versions
from benchmarks.table import RESULTS, RESULTS_REVISION, ROOT, Row, Table
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.schema import ON_DISK
from perennial.foundation.files import replace_file
from perennial.foundation.plugins import use_also

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run of a table. settings: settings_hash of its experiment; digest: the run's own experiment id."""

    row: Row
    seed: int
    settings: str
    digest: str


@dataclass(frozen=True)
class Ran:
    """One run, and where it was made."""

    summary: dict[str, Any]
    versions: dict[str, str]
    machine: str


def settings_hash(experiment: Experiment, attack: str | None = None) -> str:
    """SHA-256 of what the experiment's file and changes say, and of the attack, without defaults.

    So a setting that is new to the program does not make old results out of date, nor does an edit of a
    plug-in's file; RESULTS_REVISION counts changes of what programs do.
    """
    said = experiment.model_dump(mode="json", exclude_unset=True, exclude={**ON_DISK, "plugins": True})
    if attack:
        said["attack"] = attack
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def jobs(table: Table) -> list[Job]:
    """Every run of a table, in its order. Raises ConfigError for a row whose experiment is faulty."""
    result = []
    for row in table.rows:
        for seed in table.seeds:
            experiment = row.load(seed)
            result.append(Job(row, seed, settings_hash(experiment, row.attack), experiment.digest))
    return result


def read_results(path: Path) -> list[Result]:
    """The objects of a result file; [] where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def revision_of(result: Result) -> int:
    """The revision of the program's results that one belongs to."""
    return result.get("revision", 1)


def finished(table: Table, path: Path, revision: int = RESULTS_REVISION) -> dict[Job, Result]:
    """The results in a file that belong to the table as it is now, under its present labels and in its order.

    Those are the ones of a revision whose settings the table's experiment files and rows say today.
    """
    by_settings = {
        run.get("settings"): run
        for run in read_results(path)
        if revision_of(run) == revision and table.measures.keys() <= run["measures"].keys()
    }
    return {
        job: {**by_settings[job.settings], "row": job.row.label}
        for job in jobs(table)
        if job.settings in by_settings
    }


def newest(table: Table, path: Path) -> list[Result]:
    """The finished runs of the newest revision that has any, for pages, which name a revision that is old."""
    revisions = {revision_of(run) for run in read_results(path)}
    for revision in sorted(revisions, reverse=True):
        if found := finished(table, path, revision):
            return list(found.values())
    return []


def run_table(
    name: str,
    table: Table,
    say: Callable[[str], None] = print,
    *,
    workers: int = 1,
    device: str = "auto",
    results: Path = RESULTS,
    only: str = "",
    keep: Path | None = None,
) -> list[Result]:
    """Run what is missing, and write the result file and the Markdown page; returns the table's runs.

    workers: runs at the same time, each in a process of its own. only: text that the labels of rows to run
    contain. keep: where run folders stay; a run that was stopped at any moment goes on there after its last
    whole round. Without it a stop loses the runs in progress.
    """
    from benchmarks.controls import controls_of, run_controls
    from benchmarks.markdown import markdown

    path = results / f"{name}.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    done = finished(table, path)
    planned = jobs(table)
    missing = [job for job in planned if job not in done and only in job.row.label]
    for job, run in _runs(missing, workers, device, keep):
        done[job] = _result(table, job, run)
        with path.open("a") as file:
            file.write(json.dumps(done[job]) + "\n")
        say(f"{name}: {job.row.label}, seed {job.seed}: {done[job]['measures']}")
    run_controls(table, say, results)
    runs = [done[job] for job in planned if job in done]
    # runs of rows that have changed since are no longer part of the table
    replace_file(path, "".join(json.dumps(run) + "\n" for run in runs).encode(), mode=0o644)
    replace_file(
        results / f"{name}.md", markdown(name, table, runs, controls_of(table, results)).encode(), mode=0o644
    )
    return runs


def _runs(missing: Sequence[Job], workers: int, device: str, keep: Path | None) -> Iterator[tuple[Job, Ran]]:
    if workers == 1 or len(missing) < 2:
        for job in missing:
            yield job, run_job(job.row.file, job.row, job.seed, device, _kept(keep, job))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        waiting = {
            pool.submit(run_job, job.row.file, job.row, job.seed, device, _kept(keep, job)): job
            for job in missing
        }
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _kept(keep: Path | None, job: Job) -> Path | None:
    return keep / job.settings if keep else None


def run_job(experiment: Path, row: Row, seed: int, device: str, kept: Path | None = None) -> Ran:
    """One run of a row. kept: its run folder, in which it goes on if it began there; None: one of its own."""
    from benchmarks.dishonest import attacked_run
    from perennial.engine.run import load_resumed_settings, run_in_process

    with tempfile.TemporaryDirectory(prefix="perennial-bench-") as folder, use_also([ROOT]):
        overrides = json.dumps([*row.changes, f"seed={seed}"])
        if kept and (kept / "events.jsonl").exists():
            settings = load_resumed_settings(None, [], None, kept, device)
        else:
            runs, name = (str(kept.parent), kept.name) if kept else (folder, "")
            settings = RunSettings(str(experiment), overrides, name, runs, device=device)
        attack = row.attack
        summary = run_in_process(settings) if attack is None else attacked_run(settings, attack)
    return Ran(summary, versions(), machine(_accelerator(device)))


def _result(table: Table, job: Job, run: Ran) -> Result:
    summary = run.summary
    return {
        "row": job.row.label,
        "experiment": job.row.experiment,
        "changes": list(job.row.changes),
        "seed": job.seed,
        "revision": RESULTS_REVISION,
        "settings": job.settings,
        "digest": job.digest,
        "measures": table.measured(summary),
        "by_task": summary.get("average_accuracy", []),
        "seconds": summary["seconds"],
        "model_sha256": summary["model_sha256"],
        "versions": run.versions,
        "machine": run.machine,
    }


def _accelerator(device: str) -> str:
    import torch

    from perennial.learning.device import choose_device

    if choose_device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return ""
