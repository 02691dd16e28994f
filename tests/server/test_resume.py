"""A resumed run goes on from what the disk, the clock and the operator left of it, or says what is wrong."""

import errno
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import StateError
from perennial.server.checkpoint import BEFORE, LATEST, load_checkpoint
from perennial.server.journal import EVENTS, Journal, read_events
from tests.server.test_durability import Stop, stop_at, write

NAMES = [str(digit) for digit in range(10)]


def stopped(tmp_path: Path, round_number: int, **changes: Any) -> tuple[RunSettings, Path]:
    """Settings that resume a run whose server died while it noted a round, and the run's folder."""
    settings = RunSettings(write(tmp_path, **changes), runs=str(tmp_path / "runs"))
    with pytest.raises(Stop):
        run_in_process(settings, listener=stop_at(round_number))
    return replace(settings, resume="yes"), tmp_path / "runs" / "small"


def undisturbed(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return run_in_process(RunSettings(write(tmp_path, **changes), runs=str(tmp_path / "whole")))


def noted_rounds(folder: Path) -> list[int]:
    return [event["round"] for event in read_events(folder) if event["event"] == "round"]


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in read_events(folder) if event["event"] == "note")


def test_a_run_that_is_not_finished_keeps_its_plan(tmp_path: Path) -> None:
    tasks = {"count": 2, "rounds": 2, "order": NAMES}
    settings, folder = stopped(tmp_path, 2, tasks=tasks)
    for changed, reason in (
        ({"order": ["1", "0", *NAMES[2:]]}, "class 0 is '0' in the run's plan and '1'"),
        ({"order": [*NAMES[:5], *reversed(NAMES[5:])]}, "class 5 is '5' in the run's plan and '9'"),
        ({"count": 5}, r"tasks: the run's plan is \[0, 5, 10\], the experiment now says"),
        ({"rounds": [2, 3]}, r"tasks\.rounds: the run's plan is \[2, 2\]"),
    ):
        write(tmp_path, tasks=tasks | changed)
        with pytest.raises(StateError, match=reason):
            run_in_process(settings)
    stored = yaml.safe_load((folder / "experiment.yaml").read_text())
    assert stored["tasks"]["order"] == NAMES, "a refused experiment does not replace the run's own"
    write(tmp_path, tasks=tasks)
    resumed = run_in_process(settings)
    assert resumed["model_sha256"] == undisturbed(tmp_path, tasks=tasks)["model_sha256"]


@pytest.mark.parametrize("left", ["half a line", "nothing", "no file"])
def test_a_journal_that_lost_lines_goes_on_after_the_last_whole_one(tmp_path: Path, left: str) -> None:
    settings, folder = stopped(tmp_path, 4)
    journal = folder / EVENTS
    lines = journal.read_bytes().splitlines(keepends=True)
    cut = next(at for at, line in enumerate(lines) if json.loads(line).get("round") == 2)
    journal.write_bytes(b"".join(lines[:cut]) + lines[cut][:20])
    if left == "nothing":
        journal.write_bytes(b"")
    elif left == "no file":
        journal.unlink()
    resumed = run_in_process(settings)
    assert resumed["model_sha256"] == undisturbed(tmp_path)["model_sha256"] and resumed["rounds"] == 4
    assert noted_rounds(folder) == ([1, 4] if left == "half a line" else [4])
    assert "lost" in notes(folder), "the operator is told"
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("protected", [False, True])
def test_the_journal_is_on_the_disk_before_the_checkpoint_that_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    flush, durable, flushes = os.fsync, 0, 0
    journal = tmp_path / "runs" / "small" / EVENTS
    seen: list[tuple[int, int, int]] = []

    def fsync(descriptor: int) -> None:
        nonlocal durable, flushes
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == str(journal):
            # of what is written meanwhile nothing is known
            durable, flushes = journal.stat().st_size, flushes + 1
        elif LATEST in path:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["facts"])
            seen.append((facts["progress"]["journal_position"], durable, journal.stat().st_size))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    privacy = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}
    changes = {"privacy": privacy, "evaluation": {"federated": False}} if protected else {}
    run_in_process(RunSettings(write(tmp_path, **changes), runs=str(tmp_path / "runs")))
    assert len(seen) == 1 + 4 + 2 + 1, "at the start, after each round, each task, and at the end"
    assert all(0 < counted <= there <= written for counted, there, written in seen)
    assert not protected or all(there == written for _, there, written in seen)
    assert flushes == len(seen), "once for what is new, and not otherwise"


def test_a_checkpoint_that_cannot_be_kept_ends_the_run_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        patch.setattr(Path, "read_bytes", full)
        with pytest.raises(StateError, match=f"{BEFORE}: .*No space left"):
            run_in_process(RunSettings(write(tmp_path), runs=str(tmp_path / "runs")))
    resumed = run_in_process(RunSettings(write(tmp_path), runs=str(tmp_path / "runs"), resume="yes"))
    assert resumed["model_sha256"] == undisturbed(tmp_path)["model_sha256"]


def test_a_journal_without_room_keeps_whole_lines_and_closes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(StateError, match=f"{EVENTS}: could not be written.*resume when there is room"):
            for number in range(100):
                journal.write("round", round=number, text="x" * 200)
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written = noted_rounds(tmp_path)
    assert written == list(range(len(written))) and 10 < len(written) < 20
    assert (tmp_path / EVENTS).read_bytes().endswith(b"\n")


def table(folder: Path, shift: float = 0.0) -> None:
    rng = np.random.default_rng(1)
    rows = [
        f"{label * 3 + rng.normal() + shift},{rng.normal()},{label}" for label in (0, 1) for _ in range(40)
    ]
    (folder / "table.csv").write_text("\n".join(["u,v,label", *rows]))


def of_table(folder: Path, **data: Any) -> RunSettings:
    path = folder / "table.yaml"
    found = {"source": "csv", "path": "table.csv", "label_column": "label", "sites": 2}
    content = {
        "name": "table",
        "data": found | data,
        "tasks": {"count": 2, "rounds": 1},
        "model": {"name": "mlp", "hidden": [4]},
        "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return RunSettings(str(path), runs=str(folder / "runs"))


def test_data_that_would_be_read_in_another_way_are_refused_on_resume(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "task_started" and event["task"] == 2:
            raise KeyboardInterrupt

    table(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(of_table(tmp_path), listener=stop)
    table(tmp_path, shift=100.0)
    with pytest.raises(
        StateError, match="not read as when the run began: mean was .* and is .*restore the data"
    ):
        run_in_process(replace(of_table(tmp_path), resume="yes"))
    for columns, reason in (({"v": "numeric", "u": "numeric"}, "mean was"), ({"u": "numeric"}, "shape was")):
        table(tmp_path)
        with pytest.raises(StateError, match=reason):
            run_in_process(replace(of_table(tmp_path, columns=columns), resume="yes"))
    # written down, what was found keeps the meaning of numbers, whatever rows come
    inputs = load_checkpoint(tmp_path / "runs" / "table" / "checkpoint")[0].progress.inputs
    named = {key: dict(zip(("u", "v"), inputs[key][::2], strict=True)) for key in ("mean", "std")}
    table(tmp_path, shift=0.5)
    run_in_process(replace(of_table(tmp_path, normalise=named), resume="yes"))


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_new_rows_with_another_mean_are_refused_by_neither(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def rows(count: int, shift: float) -> list[str]:
        values = generator.normal(size=(count, 2)) + [[40 + 9 * (i % 2) + shift, 0] for i in range(count)]
        return [f"{age:.2f},{noise:.2f},{'ab'[i % 2]}" for i, (age, noise) in enumerate(values)]

    old, table = rows(160, 0.0), tmp_path / "t.csv"
    table.write_text("\n".join(["age,noise,diagnosis", *old]) + "\n")
    experiment = {
        "name": "t",
        "seed": 1,
        "data": {"source": "csv", "path": str(table), "label_column": "diagnosis", "sites": 3},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 30}]},
        "strategy": {"name": "analytic"},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment))
    invoke("run", tmp_path / "e.yaml", "--runs", tmp_path / "runs")
    before = (tmp_path / "runs" / "t" / "model.safetensors").read_bytes()
    table.write_text("\n".join(["age,noise,diagnosis", *old, *rows(40, 5.0)]) + "\n")
    checked = invoke("check", "--resume", tmp_path / "runs" / "t")
    resumed = invoke("run", "--resume", tmp_path / "runs" / "t")
    words = "they alone are asked again: 31 training records are added, 0 subtracted"
    assert words in checked and words in resumed
    assert "40 records of known classes are new: row " in checked
    # the new rows are read by the old mean
    stored = yaml.safe_load((tmp_path / "runs" / "t" / "experiment.yaml").read_text())
    assert 43 < stored["data"]["normalise"]["mean"]["age"] < 45.5
    assert (tmp_path / "runs" / "t" / "model.safetensors").read_bytes() != before
    assert "no new class and no new record" in invoke("check", "--resume", tmp_path / "runs" / "t")


def test_a_site_that_joins_is_said_to_be_asked_and_is_asked(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def rows(sites: str, names: str) -> list[str]:
        return [
            f"{generator.normal():.3f},{name},{site}" for site in sites for name in names for _ in range(30)
        ]

    old, table = rows("AB", "xy"), tmp_path / "t.csv"
    table.write_text("\n".join(["v,diagnosis,hospital", *old]) + "\n")
    block = {"source": "csv", "path": str(table), "label_column": "diagnosis", "site_column": "hospital"}
    experiment = {
        "name": "t",
        "seed": 1,
        "data": block | {"partition": {"kind": "natural"}},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 10}]},
        "strategy": {"name": "analytic"},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment))
    invoke("run", tmp_path / "e.yaml", "--runs", tmp_path / "runs")
    table.write_text("\n".join(["v,diagnosis,hospital", *old, *rows("C", "xyz")]) + "\n")
    checked = invoke("check", "--resume", tmp_path / "runs" / "t")
    assert (
        "site 'C' is new: it is asked for the sums of its" in checked and "would not be learnt" not in checked
    )
    said = int(checked.split("sums of its ")[1].split()[0])
    invoke("run", "--resume", tmp_path / "runs" / "t")
    before = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text())["analytic"]["samples"]
    own = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text())["sites"]["C"]["samples"]
    assert 0 < said <= own <= before


@pytest.mark.parametrize(
    "changed",
    [
        {"absence": [{"site": "site-0", "first_round": 1}]},
        {"evaluation": {"federated": False}},
        {"rounds": {"quorum": 2}},
    ],
)
def test_a_finished_run_keeps_the_settings_of_its_rounds_and_figures(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    run_in_process(settings)
    folder = tmp_path / "runs" / "small"
    before = [(folder / name).read_bytes() for name in ("experiment.yaml", "summary.json")]
    write(tmp_path, **changed)
    with pytest.raises(StateError, match=rf"the run is finished, .* than: {next(iter(changed))}"):
        run_in_process(replace(settings, resume="yes"))
    assert [(folder / name).read_bytes() for name in ("experiment.yaml", "summary.json")] == before
