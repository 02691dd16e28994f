"""What a server can make a site write: nothing before it is checked, and never more than the site allows."""

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client import request_count
from perennial.client.state import Quota, SiteState, clean
from perennial.config.site import StateLimits
from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.files import hold_folder, lock_folder, make_folder, measure_size
from perennial.privacy.ledger import Ledger
from perennial.protocol.messages import FinishTaskRequest, Refusal, TrainRequest
from tests.deployed_site import RUN, DeployedSite
from tests.redteam.test_ledger_rollback import update


def train(site: DeployedSite, number: int = 1, run: str = RUN, previous: Any = None) -> Refusal | None:
    return site.ask(site.request(TrainRequest, number, run, previous))


def finish(site: DeployedSite, run: str = RUN) -> Refusal | None:
    return site.ask(site.request(FinishTaskRequest, 1, run))


def state_bytes(folder: Path) -> int:
    return measure_size(folder / "state" / "runs")


def test_a_previous_model_of_another_shape_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_count, "REPEATS", 100)
    site = DeployedSite(tmp_path)
    assert train(site) is None
    before = state_bytes(tmp_path)
    for number in range(6):
        huge = {"head.weight": torch.full((5_000, 1_000), float(number))}
        refusal = train(site, 2, previous=huge)
        assert (
            refusal is not None
            and refusal.kind == "protocol"
            and "previous_arrays: not a model of this experiment" in refusal.reason
        )
    assert state_bytes(tmp_path) == before
    assert not list((tmp_path / "state").rglob("models/*"))


def test_a_model_of_the_task_before_is_kept_once_it_is_one(tmp_path: Path) -> None:
    site = DeployedSite(tmp_path)
    assert train(site) is None
    assert train(site, 2, previous=site.model(task=1)) is None
    assert len(list((tmp_path / "state").rglob("models/*.safetensors"))) == 1


def test_no_model_comes_before_the_first_task(tmp_path: Path) -> None:
    site = DeployedSite(tmp_path)
    refusal = train(site, 1, previous=site.model(task=1))
    assert (
        refusal is not None
        and refusal.kind == "protocol"
        and "before which there is no model" in refusal.reason
    )


def test_new_run_tokens_do_not_fill_the_disk(tmp_path: Path) -> None:
    site = DeployedSite(tmp_path, state={"runs": 2}, policy={"max_runs": 100})
    for token in ("1" * 16, "2" * 16):
        assert train(site, 1, token) is None
        assert finish(site, token) is None
    refusal = finish(site, "3" * 16)
    assert refusal is not None and refusal.kind == "policy" and refusal.reason.startswith("state.runs: ")
    assert sorted(path.name for path in (tmp_path / "state" / "runs").iterdir()) == ["1" * 16, "2" * 16]


def test_a_run_that_needs_more_than_the_site_gives_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    site = DeployedSite(tmp_path, state={"gigabytes": 1e-6})
    refusal = finish(site)
    assert refusal is not None and refusal.kind == "policy" and refusal.reason.startswith("state.gigabytes: ")
    assert not (tmp_path / "state" / "runs").exists()


def test_runs_that_need_more_together_than_the_site_gives_are_refused(tmp_path: Path) -> None:
    for run in "1234":
        (tmp_path / run).mkdir()
        (tmp_path / run / "model").write_bytes(bytes(24))
    quota = Quota(tmp_path, StateLimits(gigabytes=100e-9))
    quota.require(tmp_path / "5", 2)
    with pytest.raises(PolicyRefusal, match=r"^state\.gigabytes: all runs together"):
        quota.require(tmp_path / "5", 20)


def test_cleaning_removes_old_runs_and_keeps_the_ledger(tmp_path: Path) -> None:
    site = DeployedSite(tmp_path)
    for token in ("1" * 16, "2" * 16):
        assert train(site, 1, token) is None
        assert finish(site, token) is None
    old = tmp_path / "state" / "runs" / ("1" * 16)
    long_ago = time.time() - 40 * 86_400
    for path in (old, *old.rglob("*")):
        os.utime(path, (long_ago, long_ago))
    releases = len(Ledger(tmp_path / "state").read_entries())
    assert releases >= 2
    ((run, size),) = clean(tmp_path / "state", days=30)
    assert run == old.name and size > 0 and not old.exists()
    assert (tmp_path / "state" / "runs" / ("2" * 16)).is_dir()
    assert len(Ledger(tmp_path / "state").read_entries()) == releases
    assert (tmp_path / "state" / "requests.sqlite").exists()


def test_the_clean_command_says_what_it_removed(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from perennial.cli.main import app

    site = DeployedSite(tmp_path)
    assert train(site) is None
    assert finish(site) is None
    features = tmp_path / "state" / "features" / ("3" * 32)
    features.mkdir(parents=True)
    (features / "rows.float32").write_bytes(bytes(3_000_000))
    (features / "turn").touch()
    images = tmp_path / "state" / "decoded" / "images.safetensors"
    images.parent.mkdir()
    images.write_bytes(bytes(2_000_000))
    kept = CliRunner().invoke(app, ["site", "clean", str(site.file)])
    assert kept.exit_code == 0 and "features" not in kept.output and (features / "rows.float32").exists()
    assert "images" not in kept.output and images.exists()
    done = CliRunner().invoke(app, ["site", "clean", str(site.file), "--days", "0"])
    assert done.exit_code == 0, done.output
    assert "features of samples, 3.0 MB" in done.output and not (features / "rows.float32").exists()
    assert "decoded images, 2.0 MB" in done.output and not images.parent.exists()
    assert "1 runs removed; the ledger" in done.output
    assert not list((tmp_path / "state" / "runs").iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_folder_is_private_from_its_first_moment(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
        Ledger(tmp_path / "site" / "deep" / "state").charge(update())
        SiteState(tmp_path / "site" / "runs" / "r", "s").put("x", 1, {"x": torch.ones(1)}, {})
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_lock_files_are_private_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with hold_folder(tmp_path / "run", "a test"), lock_folder(tmp_path / "run"):
            assert mode(tmp_path / "run" / "lock") == mode(tmp_path / "run" / "turn") == 0o600
    finally:
        os.umask(before)


def test_no_folder_is_open_for_a_moment(tmp_path: Path) -> None:
    """Whoever watches while a site starts never sees a folder of it that others may enter."""
    seen: set[int] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for path in tmp_path.rglob("*"):
                try:
                    seen.add(mode(path) if path.is_dir() else 0o700)
                except FileNotFoundError:
                    continue

    before = os.umask(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(200):
            make_folder(tmp_path / str(number) / "b" / "c")
    finally:
        ended.set()
        watcher.join()
        os.umask(before)
    assert seen <= {0o700}


def test_a_link_in_place_of_a_lock_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(Exception, match="cannot be written"), hold_folder(tmp_path, "a test"):
        pass
    assert not (tmp_path / "victim").exists()
