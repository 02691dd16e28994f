"""The key of a run's splits: drawn once, kept over a resume, and held to by every site."""

from pathlib import Path

import numpy as np
import pytest
import torch

from perennial.client.door import keep_split_key
from perennial.client.identity import Identity
from perennial.client.site import Site, open_site
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy
from perennial.data.config import DataConfig
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ProtocolError
from perennial.protocol.stamp import Stamp
from perennial.server.checkpoint import load_checkpoint

SETTINGS = {
    "name": "keyed",
    "data": {"source": "npz", "classes": ["0", "1"], "image_size": 4, "color": "gray"},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "small_cnn", "norm": "group"},
    "learner": {
        "preset": "none",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 8,
        "epochs": 1,
        "classification": {"name": "ce"},
    },
}


def at_site(folder: Path, run: str, key: str) -> tuple[Site, Stamp]:
    path = folder / "own.npz"
    if not path.exists():
        x = np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8)
        np.savez(path, x=x, y=np.arange(60) % 2)
    experiment = Experiment.model_validate(SETTINGS)
    own = DataConfig.model_validate({"source": "npz", "path": str(path), "classes": ["0", "1"]})
    identity = Identity(
        "wien", experiment, SitePolicy(), folder / "state", "cpu", 1, own_data=own, deployed=True
    )
    stamp = Stamp(
        run=run,
        experiment=experiment.digest,
        class_order="0" * 64,
        split_key=key,
        task=1,
        round=1,
        num_classes=2,
    )
    site = open_site(identity, stamp)
    order = site.process.registry.order_hash
    return site, Stamp(**{**stamp.stamp_fields, "class_order": order})


def test_a_site_holds_a_run_to_its_first_key(tmp_path: Path) -> None:
    first, second = "a1" * 32, "b2" * 32
    site, stamp = at_site(tmp_path, "0" * 16, first)
    keep_split_key(site.state(stamp.run).folder, stamp.split_key)
    keep_split_key(site.state(stamp.run).folder, stamp.split_key)
    test = site.data.test
    other, forged = at_site(tmp_path, "0" * 16, second)
    assert not torch.equal(other.data.test, test)
    with pytest.raises(ProtocolError, match="split_key: found another one than this run began with"):
        keep_split_key(other.state(forged.run).folder, forged.split_key)
    again, stamp = at_site(tmp_path, "0" * 16, first)
    keep_split_key(again.state(stamp.run).folder, stamp.split_key)
    assert torch.equal(again.data.test, test)
    another_run, stamp = at_site(tmp_path, "1" * 16, second)
    keep_split_key(another_run.state(stamp.run).folder, stamp.split_key)
    record = next((tmp_path / "state").rglob("split-key.sha256"))
    assert record.stat().st_mode & 0o077 == 0 and first not in record.read_text()


def test_a_site_with_its_own_data_takes_no_request_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="split_key: missing"):
        at_site(tmp_path, "0" * 16, "")


def test_two_processes_cannot_begin_a_run_with_two_keys(tmp_path: Path) -> None:
    keep_split_key(tmp_path / "run", "a")
    for _ in range(2):
        with pytest.raises(ProtocolError, match="split_key"):
            keep_split_key(tmp_path / "run", "b")
    keep_split_key(tmp_path / "run", "a")


def test_a_resumed_run_keeps_its_key(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(
        "{name: e, data: {source: digits, sites: 2, samples_limit: 60}, tasks: {count: 2, rounds: 1}, "
        "model: {name: small_cnn}, learner: {preset: none, optimizer: {lr: 0.1}}}"
    )

    def key_of(resume: str, overrides: str = "") -> str:
        run_in_process(
            RunSettings(str(file), overrides, runs=str(tmp_path), name="run", resume=resume, device="cpu")
        )
        return load_checkpoint(tmp_path / "run" / "checkpoint")[0].progress.split_key

    drawn = key_of("")
    assert len(drawn) == 64 and int(drawn, 16)
    assert key_of("yes") == drawn
