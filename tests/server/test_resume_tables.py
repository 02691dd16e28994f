"""A table that gained rows of known classes: check --resume and run --resume decide alike."""

import json
from pathlib import Path

import numpy as np
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app


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
