"""What is on the disk when a run ends badly is enough to go on to the same bits; damage is named."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from perennial.cli.main import app
from perennial.client.state import SiteState
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation import files
from perennial.foundation.errors import StateError
from perennial.foundation.files import hold_folder, replace_file
from perennial.models.saved import PERSONAL_MODEL
from perennial.server import checkpoint
from perennial.server.checkpoint import BEFORE, LATEST, load_checkpoint
from perennial.server.summary import extract_hashes

SMALL = {
    "name": "small",
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 3},
    },
}


class Stop(Exception):
    """The end of a run at a moment of the test's choice."""


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def stop_at(number: int):
    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == number:
            raise Stop

    return listener


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_costs_one_round_and_no_bit(tmp_path: Path, damage: str) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    whole = run_in_process(RunSettings(settings.experiment, runs=str(tmp_path / "whole")))
    with pytest.raises(Stop):
        run_in_process(settings, listener=stop_at(4))
    latest = tmp_path / "runs" / "small" / "checkpoint" / LATEST
    data = bytearray(latest.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
    latest.write_bytes({"cut": data[:-100], "flip": data, "empty": b""}[damage])
    resumed = run_in_process(RunSettings(**{**vars(settings), "resume": "yes"}))
    assert extract_hashes(resumed) == extract_hashes(whole)
    notes = (tmp_path / "runs" / "small" / "events.jsonl").read_text()
    assert "damaged" in notes and LATEST in notes, "the operator is told"


def test_without_a_sound_checkpoint_both_files_are_named(tmp_path: Path) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    with pytest.raises(Stop):
        run_in_process(settings, listener=stop_at(3))
    folder = tmp_path / "runs" / "small" / "checkpoint"
    for name in (LATEST, BEFORE):
        (folder / name).write_bytes(b"nonsense")
    with pytest.raises(StateError, match=f"{LATEST}.*{BEFORE}"):
        run_in_process(RunSettings(**{**vars(settings), "resume": "yes"}))


@pytest.mark.parametrize(
    "change", [{"experiment": {}}, {"experiment": {"name": "small", "model": "\x1b"}}, {"checksum": None}]
)
def test_damaged_facts_of_a_checkpoint_are_an_error_that_names_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run_in_process(RunSettings(write(tmp_path), runs=str(tmp_path / "runs")))
    run = tmp_path / "runs" / "small"
    (run / "checkpoint" / BEFORE).unlink()
    latest = run / "checkpoint" / LATEST
    with safe_open(latest, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"]) | change
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if change == {"checksum": None}:
        del facts["checksum"]
    save_file(tensors, latest, {"facts": json.dumps(facts)})
    for command in (["run", "--resume"], ["check", "--resume"], ["withdraw", "--site", "site-1"]):
        with pytest.raises(StateError, match=f"{LATEST}: .*damaged") as raised:
            app([*command, str(run)], standalone_mode=False)
        assert str(raised.value).replace("\n", "").isprintable()


def test_a_damaged_model_of_a_site_is_named_by_the_run_that_counts_it(tmp_path: Path) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    run_in_process(settings)
    own = tmp_path / "runs" / "small" / "sites" / "site-0" / PERSONAL_MODEL
    own.write_bytes(b"")
    with pytest.raises(StateError, match=f"site-0/{PERSONAL_MODEL}: missing or damaged"):
        run_in_process(RunSettings(**{**vars(settings), "resume": "yes"}))


@pytest.mark.parametrize("call", [1, 4, 9])
def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    whole = run_in_process(RunSettings(settings.experiment, runs=str(tmp_path / "whole")))
    flush, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call and not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        with pytest.raises(StateError, match="No space left"):
            run_in_process(settings)
    assert not list((tmp_path / "runs").rglob("*.partial")), "nothing half-written stays"
    resume = (tmp_path / "runs" / "small" / "events.jsonl").exists()
    resumed = run_in_process(RunSettings(**{**vars(settings), "resume": "yes" if resume else ""}))
    assert extract_hashes(resumed) == extract_hashes(whole)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(StateError, match="file: could not be written.*previous file is unchanged"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old" and [found.name for found in tmp_path.iterdir()] == ["file"]


def test_two_writers_of_one_file_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write_often(byte: bytes) -> None:
        for _ in range(40):
            replace_file(path, byte * 100_000)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write_often, (b"a", b"b", b"c")))
    assert len(path.read_bytes()) == 100_000 and len(set(path.read_bytes())) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_two_servers_do_not_share_a_run_folder(tmp_path: Path) -> None:
    settings = RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))
    with (
        hold_folder(tmp_path / "runs" / "small", "the first server"),
        pytest.raises(StateError, match=r"in use by another process \(the first server, process \d+\)"),
    ):
        run_in_process(settings)
    run_in_process(settings)


def test_a_site_does_not_take_another_site_s_records(tmp_path: Path) -> None:
    SiteState(tmp_path, "graz").put("exemplars", 1, {"x": torch.ones(2)}, {})
    with pytest.raises(StateError, match="belongs to site 'graz', this is 'linz'"):
        SiteState(tmp_path, "linz").get("exemplars", before=2)
    (record,) = tmp_path.glob("*.safetensors")
    record.write_bytes(record.read_bytes()[:-3])
    with pytest.raises(StateError, match="damaged or cut short"):
        SiteState(tmp_path, "graz").get("exemplars", before=2)


def images(root: Path, sites: dict[str, dict[str, int]]) -> None:
    rng = np.random.default_rng(0)
    for site, classes in sites.items():
        for name, count in classes.items():
            folder = root / site / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_site_with_one_sample_and_a_class_that_one_site_lacks(tmp_path: Path, norm: str) -> None:
    many = {"a": 9, "b": 9, "c": 9, "d": 9}
    images(tmp_path / "data", {"graz": many, "linz": {"a": 1}, "wien": {**many, "d": 5}})
    data = {"source": "folder", "path": str(tmp_path / "data"), "image_size": 8, "color": "gray"}
    experiment = write(
        tmp_path,
        data={**data, "partition": {"kind": "natural"}},
        model={"name": "small_cnn", "norm": norm},
        # nine of a batch of eight: the last batch holds one sample
        learner={**SMALL["learner"], "batch_size": 8},
    )
    summary: Any = run_in_process(RunSettings(experiment, runs=str(tmp_path / "runs")))
    assert summary["sites"]["graz"]["rounds"] == 4
    lines = (tmp_path / "runs" / "small" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert not any(event["skipped"] for event in rounds)
    assert all(not event["dropped"] for event in rounds), rounds


DISK_WRITES_SMALL: dict[str, Any] = {
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
    path.write_text(yaml.safe_dump(DISK_WRITES_SMALL | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


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
    assert extract_hashes(resumed) == extract_hashes(whole)
