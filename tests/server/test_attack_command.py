"""`perennial attack`: figures in summary.json, a picture in the run folder, both in the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.cli.privacy import attack_command
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.server.attacks import attack_run
from perennial.server.report.write import write_report

SMALL = {
    "name": "small",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [32]},
    "learner": {"preset": "none", "epochs": 1, "optimizer": {"lr": 0.05}},
}


def test_a_run_is_attacked_and_its_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(SMALL))
    run_in_process(RunSettings(str(experiment), runs=str(tmp_path)))
    folder = tmp_path / "small"
    # the noise is the system's: a mean of two images passes the bound once in a hundred times
    attack_command(folder, victims=6, steps=60)
    loss, ratio, inversion = json.loads((folder / "summary.json").read_text())["attacks"]
    assert loss["figures"].keys() == ratio["figures"].keys()
    assert 0.3 < loss["figures"]["auc"] < 0.9
    figures = inversion["figures"]
    clear, hidden = (figures[f"mean_structural_similarity_{kind}"] for kind in ("in_the_clear", "protected"))
    assert clear > 0.8 and hidden < 0.4
    assert (folder / "attacks" / "inversion.png").read_bytes().startswith(b"\x89PNG")
    assert "Gradient inversion" in write_report(folder).read_text()
    assert "picture" in capsys.readouterr().out


def attacked(folder: Path, victims: int, steps: int, **changes: Any) -> dict[str, dict[str, Any]]:
    """The attacks' entries by the first word of their names."""
    content = SMALL | changes
    experiment = folder / f"{content['name']}.yaml"
    experiment.write_text(yaml.safe_dump(content))
    run_in_process(RunSettings(str(experiment), runs=str(folder)))
    entries = attack_run(folder / content["name"], victims, steps)
    return {entry["name"].split()[0]: entry for entry in entries}


def test_attacks_that_do_not_apply_are_left_out(tmp_path: Path) -> None:
    names = attacked(tmp_path, victims=1, steps=5, name="plain")
    assert set(names) == {"Membership,", "Gradient"}
