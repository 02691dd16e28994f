"""Checkpoints that reach the disk beside the next round: only where nothing leaves a site, and in order."""

import errno
import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation import disk_writes
from perennial.foundation.disk_writes import DiskWrites
from perennial.foundation.errors import StateError
from perennial.server import checkpoint
from perennial.server.checkpoint import BEFORE, LATEST, load_checkpoint
from perennial.server.summary import hashes_of

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 4},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}
PROTECTED = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}


def settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


def test_a_batch_waits_for_the_one_before_and_an_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    go_on, seen, flush = Event(), [], os.fsync

    def fsync(descriptor: int) -> None:
        # other threads of this process may write elsewhere
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(tmp_path):
            go_on.wait(10)
            seen.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    monkeypatch.setattr(disk_writes.os, "fsync", fsync)
    writes = DiskWrites()
    writes.begin([path])
    assert seen == [], "nobody waits for the first"
    go_on.set()
    writes.begin([path])
    assert seen[:2] == [False, True], "the file, then its folder, before the second begins"
    writes.wait()
    assert seen == [False, True, False, True]

    def full(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_writes.os, "fsync", full)
    writes.begin([path])
    with pytest.raises(StateError, match="file: could not be written .Input/output error"):
        writes.wait()
    writes.wait()


@pytest.mark.parametrize("privacy", [None, PROTECTED])
def test_only_a_run_without_protection_goes_on_before_its_checkpoint_is_on_the_disk(
    privacy: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[bool] = []
    replace = checkpoint.replace_file

    def replaced(path: Path, data: bytes, mode: int = 0o600, **options: bool) -> None:
        if path.name == LATEST:
            durable.append(options.get("durable", True))
        replace(path, data, mode, **options)

    monkeypatch.setattr(checkpoint, "replace_file", replaced)
    run_in_process(settings(tmp_path, **({} if privacy is None else {"privacy": privacy})))
    assert durable and set(durable) == {privacy is not None}


def test_a_power_cut_costs_the_newest_checkpoint_and_no_bit(tmp_path: Path) -> None:
    """What a cut leaves at worst: the newest file damaged, the one before whole, the journal cut."""
    (tmp_path / "whole").mkdir()
    whole = run_in_process(settings(tmp_path / "whole"))
    own = settings(tmp_path)

    class Stop(Exception):
        pass

    def listener(event: dict[str, Any]) -> None:
        # the sites are one round ahead of the checkpoint that will be found sound
        if event["event"] == "round" and event["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        run_in_process(own, listener=listener)
    folder = tmp_path / "runs" / "small"
    (folder / "checkpoint" / LATEST).write_bytes(b"")
    events = folder / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-200])
    assert load_checkpoint(folder / "checkpoint")[0].progress.round == 1
    assert (folder / "checkpoint" / BEFORE).exists()
    resumed = run_in_process(RunSettings(**{**vars(own), "resume": "yes"}))
    assert hashes_of(resumed) == hashes_of(whole)
