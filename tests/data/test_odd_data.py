"""Data with something odd in them are read rightly, or refused with a sentence that names it."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.data.config import DataConfig
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.data.survey import survey
from perennial.foundation.errors import DataError


def read_table(path: Path, text: str, **block: object) -> Source:
    path.write_text(text)
    return load(DataConfig.model_validate({"source": "csv", "path": str(path), **block}), 0)


@pytest.mark.parametrize(
    ("header", "row", "column"),
    [
        ("age,size,label", '{0}.5,"{0},5",{1}', "column 'size' holds numbers with a comma such as"),
        ("age;size;label", "1.{0:03};{0},5;{1}", "column 'age' holds numbers with a point such as"),
    ],
)
def test_a_column_with_another_decimal_sign_does_not_become_categories(
    tmp_path: Path, header: str, row: str, column: str
) -> None:
    text = "\n".join([header, *(row.format(index, "ab"[index % 2]) for index in range(40))])
    with pytest.raises(DataError, match=column):
        read_table(tmp_path / "t.csv", text)
    name = column.split("'")[1]
    assert read_table(tmp_path / "t.csv", text, column_kinds={name: "ignore"}).train.x.shape == (40, 2)
    assert name in survey(tmp_path / "t.csv").ignored


def test_people_who_are_nobody_are_not_one_patient(tmp_path: Path) -> None:
    rows = [f"{index},{'NA' if index in (7, 9) else index // 2},{'ab'[index % 2]}" for index in range(40)]
    text = "\n".join(["age,whose,label", *rows])
    with pytest.raises(DataError, match=r"line 9, whose: the patient is empty, 'NA'"):
        read_table(tmp_path / "t.csv", text, patient="whose")
    with pytest.raises(DataError, match=r"line 2, whose: the patient is empty, '0'"):
        read_table(tmp_path / "t.csv", text.replace("NA", "1"), patient="whose", missing=["0"])


def test_a_first_look_counts_as_reading_does(tmp_path: Path) -> None:
    """No class for an empty cell, and no image twice for a link round a folder."""
    rows = [f"{index},{'' if index in (3, 5) else 'ab'[index % 2]}" for index in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["age,label", *rows]))
    found = survey(tmp_path / "t.csv")
    assert (
        found.samples == {"a": 10, "b": 8}
        and "line 5: no class in column 'label', nor in 1" in found.notes[0]
    )
    root = tmp_path / "images"
    for name in "ab":
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.new("L", (2, 2), index).save(root / name / f"{index}.png")
    (root / "a" / "round").symlink_to(root)
    assert survey(root).samples == {"a": 3, "b": 3}


def test_init_of_tiny_images_and_of_names_in_any_script_is_ready_to_run(tmp_path: Path) -> None:
    root = tmp_path / "\u65e5\u672c \u00e9t\u00e9"
    for name in ("\u5065\u5eb7", "maladie \u00e9"):
        (root / name).mkdir(parents=True)
        for index in range(12):
            Image.new("L", (2, 2), 9 * index + len(name)).save(root / name / f"\u00df{index}.png")
    for command in (
        ["init", root, "--output", tmp_path / "o"],
        ["check", tmp_path / "o" / "experiment.yaml"],
    ):
        done = CliRunner().invoke(app, [*map(str, command)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert load_experiment(tmp_path / "o" / "experiment.yaml").name == "ete"
