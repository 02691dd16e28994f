"""Write what a release leaves on a disk and sends, so that later releases are tried with it.

    python -m tests.server.golden_states FOLDER

FOLDER/NAME.zip holds a run folder with its sites' states, site.zip a ledger with the sets of records that
paid, messages.json the fields of each message. All data are drawn by a generator. Written once for a release
(tests/golden/0.2.0), and never again.
"""

import dataclasses
import importlib
import json
import pkgutil
import shutil
import sys
import tempfile
import typing
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import perennial.protocol
from perennial.protocol.fields import WireMessage
from perennial.protocol.stamp import VERSION
from tests.server.small_runs import SmallRun

STATES: dict[str, tuple[str, str, int | None]] = {
    "replay": ("patients", "replay", 3),
    "protected": ("own", "private", 3),
    "noised_sums": ("own", "noised_sums", None),
    "sums": ("own", "analytic", None),
}
"""For each state the kind of data, the method, and the round of two tasks after which the run is stopped."""
NOISED_SUMS = {
    "model": {"name": "features", "features": [{"name": "random", "width": 8}]},
    "strategy": {"name": "analytic", "head": "gaussian"},
    "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": 2.0},
    "evaluation": {"federated": False},
}

RELEASE: dict[str, Any] = {
    "run": "run",
    "experiment": "e" * 64,
    "recipient": "server",
    "kind": "statistics",
    "unit": "sample",
    "relation": "add_remove",
    "mechanism": "gaussian",
    "noise_multiplier": 2.0,
    "sample_rate": 1.0,
    "steps": 1,
}
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}


def write_experiment(name: str, folder: Path) -> Path:
    """The experiment of a state, with its data beside it: what a resume of that state needs."""
    data, method, _ = STATES[name]
    path = SmallRun(data, "analytic" if method == "noised_sums" else method).write(folder)
    content = yaml.safe_load(path.read_text())
    content |= NOISED_SUMS if method == "noised_sums" else {}
    content["tasks"] = {"count": 2, "rounds": 1 if method in ("noised_sums", "analytic") else 2}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_state(name: str, archive: Path) -> None:
    """The folder of a run that was stopped, or has finished; for sums one site is withdrawn from it too."""
    from perennial.config.run import RunSettings
    from perennial.engine.run import run_in_process
    from perennial.server.withdrawal import withdraw

    stop_at = STATES[name][2]

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == stop_at:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as scratch:
        path = write_experiment(name, Path(scratch))
        try:
            run_in_process(RunSettings(str(path), runs=scratch), listener=stop)
        except KeyboardInterrupt:
            assert stop_at is not None, "interrupted from outside"
        run = Path(scratch) / "run"
        if name == "sums":
            withdraw(run, "linz")
        _pack(run, archive)


def write_site(archive: Path) -> None:
    """A ledger of two releases under a budget, and its book: the second is without the first record."""
    from perennial.privacy.entries import Entry
    from perennial.privacy.ledger import Ledger, Limit
    from perennial.privacy.record_book import RecordBook, as_ids

    with tempfile.TemporaryDirectory() as scratch:
        ledger, book = Ledger(Path(scratch)), RecordBook(Path(scratch), bytes(32))
        ids = as_ids(np.arange(3 * 16, dtype=np.uint8).reshape(3, 16))
        for first in (0, 1):
            entry = Entry(**RELEASE, part=f"run/task {first + 1}")
            ledger.charge(book.note(entry, ids[first:]), Limit(**BUDGET))
        _pack(Path(scratch), archive)


def _pack(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                packed.write(file, file.relative_to(folder))


def messages() -> dict[str, Any]:
    """The protocol's version and, for each message, its fields with their types, in alphabetical order."""
    for module in pkgutil.iter_modules(perennial.protocol.__path__):
        importlib.import_module(f"perennial.protocol.{module.name}")
    found = {}
    for kind in sorted(_kinds(WireMessage), key=lambda kind: kind.__name__):
        if kind.__module__.startswith("perennial.protocol"):
            hints = typing.get_type_hints(kind)
            found[kind.__name__] = {field.name: str(hints[field.name]) for field in dataclasses.fields(kind)}
    return {"version": VERSION, "messages": found}


def _kinds(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in STATES:
        write_state(name, folder / f"{name}.zip")
    write_site(folder / "site.zip")
    (folder / "messages.json").write_text(json.dumps(messages(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
