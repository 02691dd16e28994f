"""docs/your_data.md, data_files.md: commands run on files as it describes them, and the program reads its blocks."""  # noqa: E501

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import APP_ROOT
from perennial.config.site import SiteConfig
from perennial.data.config import DataConfig
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.data.survey import survey
from perennial.foundation.errors import DataError, PerennialError

PAGES = [(APP_ROOT.parent / "docs" / name).read_text() for name in ("your_data.md", "data_files.md")]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", "".join(PAGES), re.DOTALL)
# smaller maps and fewer rounds than a person would take, so that the page runs in seconds
QUICK = {
    "experiment.yaml": ["--set", "model={name: features, features: [{name: random, width: 50}]}"],
    "experiment_trained.yaml": ["--set", "tasks.rounds=1"],
}


def paint(path: Path, generator: np.random.Generator, bright: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = generator.integers(120 if bright else 0, 256 if bright else 140, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def scan(path: Path, generator: np.random.Generator, bright: bool) -> None:
    from tests.data.test_hospital_images import CT, write_dicom

    write_dicom(path, generator.integers(1000 if bright else 800, 1200, (16, 16)).astype(np.int16), **CT)


def write_files(folder: Path) -> None:
    """What the page talks of: skin, other_clinic, clinics, ct, heart.csv."""
    generator = np.random.default_rng(1)
    for kind in ("nevus", "melanoma"):
        for index in range(40):
            name = f"p{index // 2 + 1}_{index % 2}.png"
            paint(folder / "skin" / kind / name, generator, kind == "nevus")
            paint(folder / "other_clinic" / kind / name, generator, kind == "nevus")
            paint(folder / "clinics" / f"clinic-{index % 3}" / kind / name, generator, kind == "nevus")
            scan(folder / "ct" / kind / f"IM{index:04d}", generator, kind == "nevus")
    rows = []
    for i in range(90):
        hospital, diagnosis = ("north", "south")[i % 3 > 0], ("healthy", "ill")[i % 2]
        age, thal, day = 30 + i % 40 + 10 * (i % 2), (3, 6, 7)[i % 3], 1 + i % 28
        rows.append(f"{i},{age},{thal},2024-01-{day:02d},{hospital},{diagnosis}")
    header = "record_id,age,thal,visit,hospital,diagnosis"
    (folder / "heart.csv").write_text("\n".join([header, *rows]) + "\n")


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, PerennialError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_the_page_s_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydicom", reason="the extra dicom is not installed")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody's"))
    commands = [line for kind, text in BLOCKS if kind == "sh" for line in text.strip().splitlines()]
    assert len(commands) >= 10
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "perennial"
        quick = QUICK.get(Path(arguments[1]).name, []) if arguments[0] == "run" else []
        if "--against" in arguments:
            # two models of a few records: whether one is as good is not this page's matter
            judged = CliRunner().invoke(app, arguments)
            assert judged.exit_code in (0, 1) and ", margins " in Path("runs/skin/card.md").read_text()
            continue
        told = call(*arguments, *quick)
        if arguments[0] == "predict" and "--output" not in arguments:
            assert told.split("\t")[1] in ("nevus", "melanoma")
    for name in ("skin", "skin-trained", "heart"):
        assert (tmp_path / "runs" / name / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "yaml"])
def test_the_page_s_blocks_are_what_the_program_reads(text: str) -> None:
    content = yaml.safe_load(text)
    if "site" in content:
        SiteConfig.model_validate(content)
    else:
        DataConfig.model_validate(content["data"])


def test_init_looks_at_a_table(tmp_path: Path) -> None:
    write_files(tmp_path)
    call("init", str(tmp_path / "heart.csv"), "--output", str(tmp_path / "out"))
    data = load_experiment(tmp_path / "out" / "experiment.yaml").data
    assert (data.label_column, data.site_column) == ("diagnosis", "hospital")
    assert data.column_kinds == {"thal": "category", "record_id": "ignore", "visit": "ignore"}
    with pytest.raises(DataError, match="no column 'outcome'"):
        call("init", str(tmp_path / "heart.csv"), "--label", "outcome", "--output", str(tmp_path / "more"))


def test_init_proposes_a_window_a_patient_and_padding(tmp_path: Path) -> None:
    (tmp_path / "x" / "a").mkdir(parents=True)
    (tmp_path / "x" / "b").mkdir()
    for index in range(20):
        shape = (10, 40) if index % 2 else (20, 20)
        pixels = np.full(shape, 100 * index, np.uint16)
        Image.fromarray(pixels).save(tmp_path / "x" / "ab"[index % 2] / f"case{index // 3}_{index}.png")
    found = survey(tmp_path / "x")
    assert found.patient_guess is not None and found.deepest == 1900
    call("init", str(tmp_path / "x"), "--output", str(tmp_path / "out"))
    data = load_experiment(tmp_path / "out" / "experiment.yaml").data
    assert (data.window, data.resize, data.color) == ((0, 2047), "pad", "gray")


def table(folder: Path, columns: Mapping[str, Sequence[object]], separator: str = ",") -> Path:
    rows = zip(*columns.values(), strict=True)
    text = "\n".join(separator.join(map(str, row)) for row in [tuple(columns), *rows])
    (folder / "table.csv").write_text(text + "\n")
    return folder / "table.csv"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([0, 1], False),
        ([0, 1, 2], True),
        ([*range(11, 21)], True),
        ([*range(11)], False),
        ([1, 2, 21], False),
        ([-1, 0, 1], False),
        ([1, 2, 2.5], False),
    ],
)
def test_few_small_whole_numbers_are_taken_for_codes(tmp_path: Path, values: list[float], code: bool) -> None:
    cells = [values[row % len(values)] for row in range(40)]
    path = table(tmp_path, {"grade": cells, "label": ["a", "b"] * 20})
    assert survey(path).codes == (("grade",) if code else ())


def test_decimal_commas_are_numbers_and_no_codes(tmp_path: Path) -> None:
    path = table(tmp_path, {"dose": ["1,5", "2,5", "3,5", "1,5"], "label": ["a", "b"] * 2}, ";")
    found = survey(path)
    assert found.columns == {"dose": "numeric"} and found.codes == ()


def test_init_looks_at_a_list_and_at_arrays(tmp_path: Path) -> None:
    write_files(tmp_path)
    lines = [f"skin/{kind}/p1_0.png,{kind},p1" for kind in ("nevus", "melanoma")]
    (tmp_path / "list.csv").write_text("path,label,patient\n" + "\n".join(lines) + "\n")
    assert survey(tmp_path / "list.csv").patient == "patient"
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 8, 8), np.uint8), y=np.array([0, 1] * 3), classes=["u", "v"])
    assert survey(tmp_path / "a.npz").samples == {"u": 3, "v": 3}
    for shape, mode in (((6, 8, 8), "gray"), ((6, 3, 8, 8), "colour"), ((6, 8, 8, 3), "colour")):
        np.savez(tmp_path / "b.npz", x=np.zeros(shape, np.uint8), y=np.array([0, 1] * 3))
        assert [*survey(tmp_path / "b.npz").modes] == [mode]
    call("init", str(tmp_path / "a.npz"), "--output", str(tmp_path / "arrays"))
    np.savez(tmp_path / "rows.npz", x=np.zeros((6, 5)), y=np.array(["u", "v"] * 3))
    call("init", str(tmp_path / "rows.npz"), "--output", str(tmp_path / "rows"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ((), "no such file or folder"),
        (("readme.txt",), "no image in it; expected"),
        (("a.png",), "an image outside of class folders"),
    ],
)
def test_init_says_what_it_expected(tmp_path: Path, make: tuple[str, ...], words: str) -> None:
    for name in make:
        (tmp_path / "data").mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / "data" / name, format="PNG")
    with pytest.raises(DataError, match=words):
        survey(tmp_path / "data")


def test_the_reference_has_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP_ROOT.parent / "docs"))
    import schema_pages  # pyright: ignore[reportMissingImports]

    pages: Any = schema_pages
    for name, model in (("experiment_yaml", Experiment), ("site_yaml", SiteConfig)):
        text = pages.schema_page(name)
        for path, block in pages.blocks(model):
            assert f"## {path or 'The file'}" in text
            for key in block.model_fields:
                assert f"| `{key}` |" in text, (path, key)
    told = pages.explanations(DataConfig)
    assert sorted(DataConfig.model_fields.keys() - told.keys()) == []
    sys.modules.pop("schema_pages")


def read_table(path: Path, text: str, **block: object) -> Source:
    path.write_text(text)
    return load(DataConfig.model_validate({"source": "csv", "path": str(path), **block}), 0)


@pytest.mark.parametrize(
    ("header", "row", "column", "asked"),
    [
        ("age,size,label", '{0}.5,"{0},5",{1}', "column 'size' holds numbers with a comma such as", True),
        ("age;size;label", "1.{0:03};{0},5;{1}", "column 'age' holds numbers with a point such as", False),
    ],
)
def test_a_column_with_another_decimal_sign_does_not_become_categories(
    tmp_path: Path, header: str, row: str, column: str, asked: bool
) -> None:
    text = "\n".join([header, *(row.format(index, "ab"[index % 2]) for index in range(40))])
    with pytest.raises(DataError, match=column):
        read_table(tmp_path / "t.csv", text)
    name = column.split("'")[1]
    assert read_table(tmp_path / "t.csv", text, column_kinds={name: "ignore"}).train.x.shape == (40, 2)
    found = survey(tmp_path / "t.csv")
    assert [(each.key, each.value) for each in found.questions] == ([("decimal", ",")] if asked else [])
    assert (name in found.ignored) != asked


def test_people_who_are_nobody_are_not_one_patient(tmp_path: Path) -> None:
    rows = [f"{index},{'NA' if index in (7, 9) else index // 2},{'ab'[index % 2]}" for index in range(40)]
    text = "\n".join(["age,whose,label", *rows])
    with pytest.raises(DataError, match=r"line 9, whose: the patient is empty, 'NA'"):
        read_table(tmp_path / "t.csv", text, patient="whose")
    with pytest.raises(DataError, match=r"line 2, whose: the patient is empty, '0'"):
        read_table(tmp_path / "t.csv", text.replace("NA", "1"), patient="whose", missing=["0"])


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
