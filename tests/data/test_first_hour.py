"""A hospital's first hour with its own table or images: nothing is lost, and nothing false is said."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from perennial import load_run
from perennial.cli.export import export_command
from perennial.cli.init import init_command
from perennial.cli.main import app
from perennial.foundation.errors import ConfigError, DataError, PerennialError
from perennial.models.prediction import Exported
from perennial.models.saved import load_saved

HEADER = "age,chol,sex,diagnosis,hospital"


def heart(folder: Path, rows: int = 240) -> Path:
    """A table of three hospitals, one of which alone measures `chol`."""
    generator = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        ill, site = generator.random() < 0.5, "ABC"[row % 3]
        chol = f"{generator.normal(200 + 40 * ill, 30):.0f}" if site == "A" else ""
        age, sex = generator.normal(50 + 12 * ill, 8), "fm"[int(generator.random() < 0.4 + 0.3 * ill)]
        lines.append(f"{age:.1f},{chol},{sex},{'ill' if ill else 'well'},{site}")
    path = folder / "heart.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def invoke(*arguments: object, status: int | None = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert status is None or done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hour")
    invoke("init", heart(folder), "--output", folder / "first")
    invoke("run", folder / "first" / "experiment.yaml", "--runs", folder / "runs")
    return folder / "runs" / "heart"


def test_a_verdict_is_given_in_an_empty_home(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = heart(tmp_path, rows=900)
    told = invoke("evaluate", run, data, "--against", run, "--margin", "0.2", status=None)
    assert "PASSED" in told and ", PASSED: model " in (run / "card.md").read_text()
    assert [*(tmp_path / "home").rglob("*.key")] == []


def test_the_onnx_file_says_that_it_takes_raw_rows_and_names_each_number(run: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    invoke("export", run, "--output", tmp_path, "--onnx")
    properties = {
        each.key: json.loads(each.value) for each in onnx.load(tmp_path / "model.onnx").metadata_props
    }
    assert "raw values" in properties["input"] and "do neither before" in properties["input"]
    names = properties["names"]
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    assert len(names) == session.get_inputs()[0].shape[1] == 7
    assert names[:2] == ["age", "age is missing (0 or 1)"] and "sex = f (0 or 1)" in names
    # by these words alone, without any scaling, the file answers as `predict` does, for any number of rows
    texts = ["71.5,260,m", "40,,f", "52,,x"]
    values = np.array(
        [[71.5, 0, 260, 0, 0, 1, 0], [40, 0, np.nan, 1, 1, 0, 0], [52, 0, np.nan, 1, 0, 0, 1]],
        dtype=np.float32,
    )
    model, rows = load_run(run).model, tmp_path / "rows.csv"
    for some in (slice(0, 1), slice(0, 3)):
        rows.write_text("\n".join(["age,chol,sex", *texts[some]]))
        stated = session.run(None, {session.get_inputs()[0].name: values[some]})[0]
        told = [[*each.probabilities.values()] for each in model.predict(rows)]
        assert stated.tolist() == [pytest.approx(each, abs=1e-5) for each in told]


def test_no_onnx_file_is_written_that_takes_one_number_of_rows_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")

    class Fixed(Exported):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x[: len(x)])

    monkeypatch.setattr("perennial.models.prediction.Exported", Fixed)
    with pytest.raises(PerennialError, match="no other number of samples"):
        export_command(run, tmp_path, onnx=True)
    assert not (tmp_path / "model.onnx").exists()


def test_a_row_without_a_finite_answer_is_refused_by_name(tmp_path: Path) -> None:
    invoke("init", heart(tmp_path), "--output", tmp_path / "first")
    trained, runs = tmp_path / "first" / "experiment_trained.yaml", tmp_path / "runs"
    invoke("run", trained, "--set", "tasks.rounds=1", "--runs", runs)
    (tmp_path / "far.csv").write_text("age,chol,sex\n40.5,260,m\n-1e30,260,m\n")
    with pytest.raises(DataError, match=r"far.csv.*3: found numbers so large"):
        list(load_run(runs / "heart-trained").model.predictions([tmp_path / "far.csv"]))


def test_a_table_with_none_of_the_models_columns_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("alter,groesse\n40,180\n")
    told = CliRunner().invoke(app, ["predict", str(run), str(tmp_path / "other.csv")])
    assert isinstance(told.exception, DataError) and "other.csv: no column" in str(told.exception)


def test_a_model_reads_other_tables_by_the_settings_of_its_own(tmp_path: Path) -> None:
    """Decimal commas in a file with commas; a folder in another unit; a class that looks like a formula."""

    def spell(text: str) -> str:
        return "".join(
            ",".join('"' + cell.replace(".", ",") + '"' for cell in line.split(",")) + "\n"
            for line in text.replace(",ill", ",=ill").splitlines()
        )

    table, new = heart(tmp_path), tmp_path / "new"
    table.write_text(spell(table.read_text()))
    data = {"source": "csv", "path": str(table), "label_column": "diagnosis", "decimal": ","}
    data |= {"site_column": "hospital", "partition": {"kind": "natural"}}
    settings = {
        "name": "commas",
        "data": data,
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
        "strategy": {"name": "analytic"},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(settings))
    invoke("run", tmp_path / "experiment.yaml", "--runs", tmp_path / "runs")
    run = tmp_path / "runs" / "commas"
    assert load_saved(run / "model.safetensors").inputs.columns == {
        **{"age": "numeric", "chol": "numeric"},
        "sex": ["f", "m"],
    }
    new.mkdir()
    (new / "rows.csv").write_text("age,chol,sex\n" + "".join(f'"{40 + k}000,5","260",m\n' for k in range(30)))
    told = CliRunner().invoke(app, ["predict", str(run), str(new), "--format", "csv"])
    assert told.exit_code == 0, told.output
    assert "rows.csv: column 'age'" in told.stderr and "another unit" in told.stderr
    assert "'=ill" in told.stdout and ",=ill" not in told.stdout
    held = heart(tmp_path / "new")
    held.write_text(spell(held.read_text().replace("1", "2")))
    invoke("evaluate", run, held)


def test_init_that_stops_leaves_no_file_and_asks_nothing_where_files_are(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("age,label\n" + "".join(f"{20 + i},{'ab'[i % 2]}\n" for i in range(40)))
    with pytest.raises(ConfigError, match="site"):
        init_command(table, tmp_path / "out", "no name of a site")
    assert not list((tmp_path / "out").glob("*"))
    init_command(table, tmp_path / "out", "")

    def ask(question: str, allowed: object) -> str:
        raise AssertionError(f"asked {question} before it looked for files")

    for folder in ("A/mel", "A/nv", "B/bcc"):
        (tmp_path / "skin" / folder).mkdir(parents=True)
        (tmp_path / "skin" / folder / "1.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"experiment\.yaml: exists already"):
        init_command(tmp_path / "skin", tmp_path / "out", "", ask=ask)
