"""What a person mistypes at the command line is answered with a sentence, and changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from perennial.cli.check import check_command
from perennial.cli.export import export_command
from perennial.cli.live import LiveDisplay
from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.data.npz import read_samples
from perennial.foundation.errors import ConfigError, DataError, StateError
from perennial.foundation.files import hold_folder
from perennial.learning.device import choose_device

EXPERIMENT: dict[str, Any] = {
    "name": "odd",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}
RING = {
    "strategy": {"name": "serial_ring", "segments": 2},
    "privacy": {"mode": "client_local", "clip_norm": 0.5, "noise_multiplier": 4.0},
    "evaluation": {"federated": False},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes, allow_unicode=True))
    return path


def call(*arguments: object) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.mark.parametrize("change", ["data.sites=[", "seed=2024-02-30", "model={a: 1, a: 2}"])
def test_a_setting_that_yaml_cannot_read_is_named(tmp_path: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=r"--set '.*': not valid YAML: "):
        load_experiment(write(tmp_path), [change])


def test_names_of_classes_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "odd.npz",
        x=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        y=np.arange(40) % 2,
        classes=np.array(["naevus [/b]", "[red]other"]),
    )
    data = {"source": "npz", "path": "odd.npz", "sites": 2, "partition": {"kind": "iid"}}
    path = write(tmp_path, data=data)
    check_command(path, None)
    shown = capsys.readouterr().out
    assert "naevus [/b]" in shown and "[red]other" in shown
    display = LiveDisplay(load_experiment(path))
    console = Console(width=100)
    display.show_event({"event": "task_started", "classes": ["naevus [/b]", "[red]other"]})
    with console.capture() as table:
        console.print(display._build_table())
    assert "naevus [/b], [red]other" in table.get()


def test_a_run_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "afile").write_text("")
    for runs in (tmp_path / "afile", Path("/proc/odd")):
        with pytest.raises(StateError, match="no folder, and none can be made here"):
            call("run", path, "--runs", runs, "--name", "a")
    with pytest.raises(ConfigError, match="allowed 1 to 227 bytes"):
        call("run", path, "--runs", tmp_path, "--name", "a" * 300)
    (tmp_path / "b" / "lock").mkdir(parents=True)
    with pytest.raises(StateError, match="cannot be written to"), hold_folder(tmp_path / "b", "test"):
        pass
    with pytest.raises(StateError, match="no run to resume here"):
        call("run", "--resume", tmp_path / ("a" * 300))


def test_a_device_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("foo", "", "cuda:", "cuda:-1", "meta", "CUDA"):
        with pytest.raises(ConfigError, match=f"device: found '{device}', allowed auto, cpu, cuda"):
            choose_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(StateError, match="'cuda:99', but PyTorch sees 2 GPUs; allowed: cuda:0 to cuda:1"):
        choose_device("cuda:99")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.npz"
    np.savez_compressed(path, x=np.zeros((200, 8), dtype=np.float32))
    content = bytearray(path.read_bytes())
    content[60:80] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cut\.npz: not an \.npz file of plain arrays"):
        read_samples(path)


def test_a_model_goes_to_another_folder_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.safetensors").write_bytes(b"model")
    monkeypatch.setattr("perennial.models.saved.load_saved", lambda path: None)
    (tmp_path / "afile").write_text("")
    for output in (tmp_path / "afile", Path("/proc/odd")):
        with pytest.raises(StateError, match="no folder, and none can be made here"):
            export_command(run, output, onnx=False)
    with pytest.raises(StateError, match="is the run's own folder"):
        export_command(run, run / ".." / "run", onnx=False)
    assert [path.name for path in run.iterdir()] == ["model.safetensors"]


def test_files_for_a_federation_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(StateError, match="afile: no folder, and none can be made here"):
        call("deploy", "init", tmp_path / "afile", "--host", "h", "--name", "f")


def test_what_a_strategy_refuses_is_told_by_check_and_before_a_run_is_begun(tmp_path: Path) -> None:
    path = write(tmp_path, **RING)
    with pytest.raises(ConfigError, match=r"strategy\.segments: found 2"):
        check_command(path, None)
    with pytest.raises(ConfigError, match=r"strategy\.segments: found 2"):
        call("run", path, "--runs", tmp_path / "runs")
    assert not (tmp_path / "runs" / "odd" / "events.jsonl").exists()
    # the corrected experiment takes the same folder
    call("run", path, "--runs", tmp_path / "runs", "--set", "strategy.segments=1")


def test_what_a_strategy_refuses_when_a_task_begins_is_told_too(tmp_path: Path) -> None:
    own = {"name": "fedper", "personal": ["gate.*"]}
    with pytest.raises(ConfigError, match=r"'gate\.\*'"):
        check_command(write(tmp_path, strategy=own), None)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"site": "site-02", "first_round": 1}, r"absence: found site 'site-02' .did you mean 'site-2'"),
        (
            {"site": "site-0", "first_round": 3, "last_round": 1},
            "last_round: found 1, allowed from first_round",
        ),
    ],
)
def test_an_absence_that_cannot_be_is_refused(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_experiment(write(tmp_path, absence=[entry]))


def test_an_absence_of_a_site_that_data_name_is_checked_with_the_data(tmp_path: Path) -> None:
    natural = {"source": "synth_groups", "partition": {"kind": "natural"}}
    away = [{"site": "group-0-site-1", "first_round": 1}]
    check_command(write(tmp_path, data=natural, absence=away), None)
    away[0]["site"] = "group-0-site-x"
    with pytest.raises(ConfigError, match=r"absence: found site 'group-0-site-x'"):
        check_command(write(tmp_path, data=natural, absence=away), None)
    # where every hospital brings its own data, the server knows no names
    apart = {"source": "npz", "classes": ["a", "b"], "sites": 2}
    assert load_experiment(write(tmp_path, data=apart, absence=away)).absence[0].site == "group-0-site-x"


@pytest.mark.parametrize(("words", "nearest"), [(["chekc"], "check"), (["site", "aprove"], "approve")])
def test_a_mistyped_command_is_answered_with_one_suggestion(words: list[str], nearest: str) -> None:
    said = CliRunner().invoke(app, words).output
    assert f"'{nearest}'" in said and said.lower().count("did you mean") == 1
