"""A run can always be run again: its folder is settled first, and a refusal leaves nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial import Source, run
from perennial.cli.main import app
from perennial.config.run import APP_ROOT
from perennial.engine.run_folders import create_run_folder, has_finished_round
from perennial.foundation.errors import ConfigError, PerennialError, StateError
from perennial.foundation.files import hold_folder

QUICKSTART = APP_ROOT / "experiments" / "quickstart.yaml"
ROUND = '{"event": "round", "round": 1}\n'


def fill(folder: Path, journal: str) -> None:
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "events.jsonl").write_text('{"event": "run_started"}\n' + journal)


def test_folders_are_numbered_and_an_unfinished_one_is_taken_over(tmp_path: Path) -> None:
    for expected in ("one", "one-2", "one-3"):
        with create_run_folder("one", tmp_path) as folder:
            fill(folder, ROUND)
        assert folder == tmp_path / expected and has_finished_round(folder)
    (tmp_path / "one-2" / "events.jsonl").write_text('{"event": "run_started"}\n')
    with create_run_folder("one", tmp_path) as folder:
        assert folder.name == "one-2" and not [*folder.iterdir()]
        fill(folder, ROUND)
    with create_run_folder("one", tmp_path, overwrite=True) as folder:
        assert folder.name == "one" and not [*folder.iterdir()]


def test_a_run_at_work_and_other_peoples_files_stay(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "busy", "server"):
        with create_run_folder("busy", tmp_path) as folder:
            assert folder.name == "busy-2"
        with (
            pytest.raises(StateError, match="in use by another process"),
            create_run_folder("busy", tmp_path, True),
        ):
            pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment.yaml").write_text("mine")
    with create_run_folder("mine", tmp_path) as folder:
        assert folder.name == "mine-2"
    with pytest.raises(StateError, match="no run's"), create_run_folder("mine", tmp_path, True):
        pass
    assert (tmp_path / "mine" / "experiment.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    "setting",
    [
        "strategy=scaffold",
        "strategy=fedporx",
        "strategy={name: fedadam, server_lrr: 1}",
        "strategy={name: fedavgm, momentum: 1}",
        "learner.epochs=0",
        "clients=3",
    ],
)
def test_a_wrong_setting_is_refused_before_data_are_read_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    def read(*_: Any) -> None:
        pytest.fail("data were read")

    monkeypatch.setattr("perennial.config.simulation.build", read)
    runs = tmp_path / "runs"
    with pytest.raises(PerennialError):
        app(["run", str(QUICKSTART), "--runs", str(runs), "--set", setting], standalone_mode=False)
    with pytest.raises(PerennialError):
        run(QUICKSTART, runs=runs, overrides=[setting])
    assert not runs.exists()


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    content = {
        "name": "refused",
        "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "mlp", "hidden": [8]},
        "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
        "strategy": "scaffold",
    }
    path = tmp_path / "refused.yaml"
    path.write_text(yaml.safe_dump(content))
    runs = tmp_path / "runs"
    for faulty in ([], ["--set", "learner.epochs=0"]):
        with pytest.raises(PerennialError):
            app(["run", str(path), "--runs", str(runs), *faulty], standalone_mode=False)
        assert not runs.exists()
    command = ["run", str(path), "--runs", str(runs), "--set", "strategy=fedavg", "--device", "cpu"]
    app(command, standalone_mode=False)
    app([*command, "--workers", "2"], standalone_mode=False)
    assert sorted(found.name for found in runs.iterdir()) == ["refused", "refused-2"]
    shutil.rmtree(runs / "refused-2")
    app([*command, "--overwrite"], standalone_mode=False)
    assert sorted(found.name for found in runs.iterdir()) == ["refused"]


def test_an_overwritten_run_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    fill(tmp_path / "one", ROUND)
    with pytest.raises(PerennialError), create_run_folder("one", tmp_path, overwrite=True):
        raise PerennialError("refused")
    assert has_finished_round(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt), create_run_folder("one", tmp_path, overwrite=True) as folder:
        fill(folder, "")
        raise KeyboardInterrupt
    assert not has_finished_round(folder) and [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_run_that_a_killed_process_set_aside_comes_back_after_a_refusal(tmp_path: Path) -> None:
    fill(tmp_path / ".one.earlier", ROUND)
    with pytest.raises(PerennialError), create_run_folder("one", tmp_path, overwrite=True):
        raise PerennialError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and has_finished_round(tmp_path / "one")


def test_runs_that_begin_at_the_same_time_get_different_folders(tmp_path: Path) -> None:
    with create_run_folder("one", tmp_path) as first, create_run_folder("one", tmp_path) as second:
        assert (first.name, second.name) == ("one", "one-2")
        with pytest.raises(StateError, match="in use"), create_run_folder("one", tmp_path, overwrite=True):
            pass


def test_a_run_goes_on_in_its_own_folder_alone(tmp_path: Path) -> None:
    for options in (["--name", "other"], ["--runs", str(tmp_path / "other")], ["--overwrite"]):
        with pytest.raises(ConfigError, match=f"{options[0]}: found"):
            app(["run", "--resume", str(tmp_path / "one"), *options], standalone_mode=False)
    held: list[dict[str, Any]] = [
        {"name": "other"},
        {"runs": tmp_path / "other"},
        {"overwrite": True},
        {"data": Source.of([0], [0]), "experiment": {"model": "mlp"}},
    ]
    for said in held:
        with pytest.raises(ConfigError, match=f"{next(iter(said))}: found"):
            run(resume=tmp_path / "one", **said)
    with pytest.raises(StateError, match="no run to resume"):
        run(resume=tmp_path / "one", name="one", runs=tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "../one", "a/b", "/one", ".one", "x" * 300, "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name: found"), create_run_folder(name, tmp_path / "runs"):
        pass
    assert not [*tmp_path.iterdir()]
