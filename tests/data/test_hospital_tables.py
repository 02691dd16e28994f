"""Tables as hospitals have them: bad cells, decimal commas, old encodings, dates, codes, missing values."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from perennial.cli.init import init_command
from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.data.config import DataConfig
from perennial.data.csv_file import find_odd_numbers, read_csv
from perennial.data.deployed import load_site, merge_site_config
from perennial.data.federation import build
from perennial.data.inputs import describe_strange_columns, read_inputs
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.data.table_columns import locate_numbers
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, DataError
from tests.federations import resolved

ONE_TASK = TasksConfig(count=1, rounds=1)


def config(path: Path, **block: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "csv", "path": str(path), **block})


def read(path: Path, **block: Any) -> Source:
    return load(config(path, **block), seed=0)


def write(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "table.csv"
    path.write_bytes(text.encode(encoding))
    return path


def ages(folder: Path, *bad: str) -> Path:
    """Ninety-two ages, two of which are no numbers."""
    cells = [str(20 + index) for index in range(90)]
    cells[10:10], cells[50:50] = [bad[0]], [bad[1]]
    return write(folder, "age,label\n" + "".join(f"{cell},{'ab'[i % 2]}\n" for i, cell in enumerate(cells)))


def test_two_bad_cells_are_named_and_make_no_categories(tmp_path: Path) -> None:
    path = ages(tmp_path, "unknown", "4o")
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "column 'age', line 12: 'unknown' is not a number" in message
    assert "column 'age', line 52: '4o' is not a number" in message
    assert "data.missing" in message and "data.column_kinds" in message
    with pytest.raises(DataError, match="line 52: '4o'"):
        read(path, missing=["unknown"])
    source = read(path, missing=["unknown", "4o"])
    assert source.columns == {"age": "numeric"}
    assert source.train.x[[10, 50], 1].tolist() == [1, 1] and source.train.x[:, 1].sum() == 2


def test_bad_cells_can_be_taken_as_missing_up_to_a_limit(tmp_path: Path) -> None:
    path = ages(tmp_path, "unknown", "4o")
    source = read(path, unreadable="skip")
    assert source.train.x[:, 1].sum() == 2 and len(source.train) == 92
    assert "2 of 92" in source.notes[0] and "line 52" in source.notes[0]
    with pytest.raises(DataError, match="line 22"):
        read(write(tmp_path, "age,label\n" + "1,a\n2,b\n" * 10 + "x,a\ny,b\n"), unreadable="skip")


GERMAN = "Größe;Gewicht;Diagnose\n1,80;1.012,5;Übel\n1,65;60;gut\n"


def test_decimal_commas_and_latin_1_are_recognised_and_noted(tmp_path: Path) -> None:
    source = read(write(tmp_path, GERMAN, "latin-1"), label_column="Diagnose")
    assert source.train.x[:, [0, 2]].flatten().tolist() == pytest.approx([1.8, 1012.5, 1.65, 60])
    assert source.classes == ("gut", "Übel")
    assert any("decimal comma" in note for note in source.notes)
    assert any("Latin-1" in note for note in source.notes)
    said = read(write(tmp_path, GERMAN, "latin-1"), label_column="Diagnose", decimal=",")
    assert len(said.notes) == 1 and torch.equal(said.train.x, source.train.x)


@pytest.mark.parametrize("dates", [("2024-03-01", "2024-03-02"), ("01.03.2024", "2.3.2024")])
def test_dates_are_days_and_noted(tmp_path: Path, dates: tuple[str, str]) -> None:
    source = read(write(tmp_path, f"visit,label\n{dates[0]},x\n{dates[1]},y\n,x\n"))
    assert source.columns == {"visit": "date"}
    assert source.train.x[:2, 0].tolist() == [19783, 19784]
    assert source.train.x[2, 0].isnan() and source.train.x[2, 1] == 1
    assert "holds dates" in source.notes[0] and "column_kinds: ignore" in source.notes[0]


def test_dates_that_can_be_read_in_two_ways_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, "visit,age,label\n03/04/2024,1,x\n05/06/2024,2,y\n")
    with pytest.raises(DataError, match=r"'03/04/2024', in which day and month .* write them as 2024-12-31"):
        read(path)
    assert read(path, column_kinds={"visit": "ignore"}).columns == {"age": "numeric"}


GAPS = "a,b,label\n1,10,x\n2,,x\n3,30,y\n,40,y\n100,50,x\n"


@pytest.mark.parametrize(
    ("imputation", "stands"),
    [
        ("mean", (26.5, 32.5)),
        ("median", (2.0, 30.0)),
        (-1, (-1.0, -1.0)),
        ({"a": 7, "b": 8}, (7.0, 8.0)),
    ],
)
def test_what_stands_for_a_missing_number(
    tmp_path: Path, imputation: Any, stands: tuple[float, float]
) -> None:
    block = config(write(tmp_path, GAPS), sites=1, test_fraction=0, imputation=imputation)
    federation = build(block, ONE_TASK, 1)
    x = next(iter(federation.sites.values())).x
    assert (x[3, 0].item(), x[1, 2].item()) == pytest.approx(stands)
    assert x[:, 1].tolist() == [0, 0, 0, 1, 0] and x[:, 3].tolist() == [0, 1, 0, 0, 0]
    described = resolved(federation, block)
    again = build(described, ONE_TASK, 1)
    assert torch.equal(next(iter(again.sites.values())).x, x)
    assert not again.estimated_constants and federation.estimated_constants


def test_a_site_alone_takes_constants_and_no_medians(tmp_path: Path) -> None:
    experiment = config(
        write(tmp_path, GAPS),
        classes=["x", "y"],
        columns={"a": "numeric", "b": "numeric"},
        imputation={"a": 7, "b": 8},
        normalise={"mean": {"a": 1, "b": 1}, "std": {"a": 1, "b": 1}},
    )
    site = config(write(tmp_path, GAPS), unreadable="skip")
    merged = merge_site_config(experiment, site)
    assert merged.unreadable == "skip" and merged.imputation == {"a": 7, "b": 8}
    data = load_site(merged, ("x", "y"), "here", 1, bytes(32))
    assert data.x[3, 0] == 7 and data.fill is not None
    with pytest.raises(ConfigError, match="no site alone can know"):
        load_site(merged.model_copy(update={"imputation": "median"}), ("x", "y"), "here", 1, bytes(32))
    with pytest.raises(ConfigError, match="'c' is no numeric column"):
        read(write(tmp_path, GAPS), imputation={"a": 1, "b": 2, "c": 3})


def test_the_model_s_rows_are_filled_and_read_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("b;a\n1,5;\n;2\n")
    fill = torch.tensor([7.0, 0.0, 8.0, 0.0])
    columns = {"a": "numeric", "b": "numeric"}
    path = tmp_path / "new.csv"
    ((_, x),) = read_inputs([path], (4,), "float32", fill, config(path), columns)
    assert np.allclose(x, [[7, 1, 1.5, 0], [2, 0, 8, 1]])


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"columns": {"a": "numeric"}, "column_kinds": {"a": "numeric"}}, "column_kinds is for data without"),
        ({"column_kinds": {"label": "category"}}, "which is the label_column"),
        ({"window": [0, 1]}, "window belongs to source folder or npz"),
        ({"unreadable": {"action": "skip", "at_most": 0.5}}, "up to 5 % are skipped"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(tmp_path / "table.csv", **block)


def test_columns_unlike_the_training_data_are_named(tmp_path: Path) -> None:
    """Cholesterol in another unit, a category that training did not have; nothing of usual rows."""
    columns = {"chol": "numeric", "sex": ("f", "m")}
    mean, std = torch.tensor([200.0, 0, 0, 0, 0]), torch.tensor([50.0, 1, 1, 1, 1])

    def said(*rows: str) -> list[str]:
        file = read_csv(write(tmp_path, "\n".join(["chol,sex", *rows])))
        return describe_strange_columns(file, columns, mean, std)

    draw = np.random.default_rng(0)
    usual = draw.normal(200, 50, 60)
    assert said(*(f"{value:.0f},{'fm'[i % 2]}" for i, value in enumerate(usual)), ",") == []
    (found,) = said(*(f"{value / 38.67:.2f},f" for value in usual))
    assert found.startswith("column 'chol'") and "another unit" in found
    assert said("210,m") == [] and "'chol'" in said("4,m")[0]
    (found,) = said("210,d", "190,f")
    assert found == "column 'sex': 1 of 2 rows have 'd', which training did not have"


def test_inputs_of_several_batches_come_with_their_names(tmp_path: Path) -> None:
    x = np.arange(1200, dtype=np.float32).reshape(600, 2)
    path = tmp_path / "rows.npz"
    np.savez(path, x=x)
    pieces = [*read_inputs([path], (2,), "float32", torch.zeros(2), config(path))]
    assert [len(names) for names, _ in pieces] == [len(part) for _, part in pieces] == [256, 256, 88]
    assert [name for names, _ in pieces for name in names] == [f"{path}[{row}]" for row in range(600)]
    assert torch.equal(torch.cat([part for _, part in pieces]), torch.from_numpy(x))


CLINIC = """Fallnummer;Alter;CRP;Kreatinin;Laktat;NYHA;Diagnose
F1;57;<0,5;,9 mg/dl;1.2;1;krank
F2;unbekannt;12,5;1,1 mg/dl;1,4;2;gesund
F3;61,5;3;1,2 mg/dl;2,0;1.0;krank
F4;48;<0,5;0,8 mg/dl;1,1;3;gesund
F5;52;4,1;1,0 mg/dl;1,3;2;krank
F6;66;8,0;1,4 mg/dl;1,9;1;gesund
"""


def test_a_german_table_is_asked_about_once_and_read_as_answered(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(CLINIC.encode("cp1252"))
    asked = list[str]()

    def ask(question: str, allowed: Sequence[str]) -> str:
        asked.append(question)
        return "yes"

    init_command(path, tmp_path / "out", "", label="Diagnose", ask=ask)
    assert [question.split("`")[1] for question in asked] == [
        "units: {Kreatinin: mg/dl}",
        "limits: [CRP]",
        "missing: [unbekannt]",
    ]
    data = load_experiment(tmp_path / "out" / "experiment.yaml").data
    source = load(data, seed=0)
    assert source.columns is not None and "Fallnummer" not in source.columns
    at = locate_numbers(source.columns)
    x = source.train.x
    assert x[:, at["CRP"]].tolist() == pytest.approx([0.5, 12.5, 3, 0.5, 4.1, 8])
    assert x[:, at["Kreatinin"]].tolist() == pytest.approx([0.9, 1.1, 1.2, 0.8, 1.0, 1.4])
    assert x[:, at["Laktat"]].tolist() == pytest.approx([1.2, 1.4, 2.0, 1.1, 1.3, 1.9])
    assert x[1, at["Alter"]].isnan() and source.columns["NYHA"] == ("1", "2", "3")


def test_where_nobody_is_there_to_ask_init_names_the_options_that_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(CLINIC.encode("cp1252"))
    options = "--units Kreatinin=mg/dl --limits CRP --missing unbekannt"
    with pytest.raises(DataError, match=options):
        init_command(path, tmp_path / "out", "", label="Diagnose")
    assert not (tmp_path / "out").exists()
    given = ["--label", "Diagnose", "--output", str(tmp_path / "out"), *options.split()]
    done = CliRunner().invoke(app, ["init", str(path), *given])
    assert done.exit_code == 0, done.output
    assert load_experiment(tmp_path / "out" / "experiment.yaml").data.limits == ("CRP",)


@pytest.mark.parametrize(
    "cells", [("3a", "2b"), ("1a", "2a"), ("5 mg", "0.1 g"), ("<30", "30-60"), ("T1", "T2")]
)
def test_stages_several_units_and_groups_are_no_numbers_with_units(cells: tuple[str, ...]) -> None:
    texts = np.array(cells * 5, dtype=np.dtypes.StringDType())
    assert find_odd_numbers(texts) == ("", False)


def test_a_sheet_is_read_as_a_csv_file_is(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"age": [50, 61, None], "sex": ["m", "f", "m"], "label": ["a", "b", "a"]})
    late = polars.DataFrame(
        {"age": ["unbekannt" if row == 1500 else str(row) for row in range(2000)], "label": "a"}
    )
    with suppress(ModuleNotFoundError):  # what writes workbooks is no part of the extra
        late.with_columns(age=polars.col("age")).write_excel(tmp_path / "t.xlsx")
        assert read_csv(tmp_path / "t.xlsx").columns["age"].tolist()[1500] == "unbekannt"
    frame.write_parquet(tmp_path / "t.parquet")
    found = read_csv(tmp_path / "t.parquet")
    assert {name: texts.tolist() for name, texts in found.columns.items()} == {
        "age": ["50", "61", ""],
        "sex": ["m", "f", "m"],
        "label": ["a", "b", "a"],
    }
