"""Sixty prepared faults: broken, ambiguous, leaking. Each is named by init or check, before a sum leaves."""

import csv
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.data_tables import describe_data
from perennial.cli.init import init_command
from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.data.federation import build
from perennial.data.suspicion import find_suspicions
from perennial.foundation.errors import PerennialError

HEADER = ["alter", "druck", "geschlecht", "raucher", "diagnose"]
Rows = list[list[Any]]


def tidy(rows: int = 120, seed: int = 0) -> Rows:
    """Patients with two classes that overlap."""
    generator = np.random.default_rng(seed)
    found: Rows = [HEADER]
    for index in range(rows):
        ill = index % 3 == 0
        age, pressure = generator.normal(55 + 8 * ill, 9), generator.normal(125 + 12 * ill, 14)
        sex, smokes = generator.choice(["m", "w"]), generator.choice(["ja", "nein"])
        found.append([f"{age:.0f}", f"{pressure:.1f}", sex, smokes, "krank" if ill else "gesund"])
    return found


def write(path: Path, rows: Rows, separator: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


def column(name: str, value: Callable[[int, list[Any]], Any], rows: int = 120) -> Rows:
    """The tidy table with one more column in front. value: from the row's number and its cells."""
    first, *others = tidy(rows)
    return [[name, *first], *([value(index, row), *row] for index, row in enumerate(others))]


def changed(place: int, value: Callable[[int, list[Any]], Any], rows: int = 120) -> Rows:
    """The tidy table with other cells in one column."""
    first, *others = tidy(rows)
    return [first, *([*r[:place], value(i, r), *r[place + 1 :]] for i, r in enumerate(others))]


def image(path: Path, seed: int, level: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    if level is not None:
        pixels[:] = [level, 0, 0]
    Image.fromarray(pixels).save(path)


def folder(root: Path, *names: str, count: int = 8) -> Path:
    """Images of noise in class folders."""
    for number, name in enumerate(names):
        for index in range(count):
            image(root / name / f"{index}.png", 100 * number + index)
    return root


def said(path: Path, check: bool = False, **options: Any) -> str:
    """What init says of data and writes, or its error; with check what the data say that it then reads."""
    output = path.parent / f"init-{path.stem}"
    try:
        lines = [*init_command(path, output, "", **options), (output / "experiment.yaml").read_text()]
        assert yaml.safe_load(lines[-1]), "what init wrote can be read"
        if check:
            experiment = load_experiment(output / "experiment.yaml")
            held = build(experiment.data, experiment.tasks, experiment.seed)
            asked = find_suspicions(experiment.data, held.sites, held.classes, held.test)
            lines = [*held.notes, *describe_data(held.sites, held.classes).list_warnings()]
            lines += [f"question: {each}" for each in asked]
    except PerennialError as error:
        lines = [str(error)]
    return " ".join(" ".join(lines).split())


ILL = HEADER.index("diagnose")
TABLES: dict[str, tuple[Rows, str]] = {
    # broken
    "no row": ([HEADER], "the table has no row"),
    "a column twice": (
        [["alter", *HEADER], *([1, *row] for row in tidy()[1:])],
        "must name every column once",
    ),
    "a row too short": ([*tidy(), ["55", "130"]], "2 values for 5 columns"),
    "an empty label": (
        changed(ILL, lambda i, r: "" if i == 7 else r[ILL]),
        "label is empty|no class in column",
    ),
    "a date in two ways": (
        column("tag", lambda i, r: f"0{i % 9 + 1}/04/2024"),
        "day and month cannot be told",
    ),
    "free text": (column("befund", lambda i, r: f"Befund {i} ohne Nummer"), "too many for categories"),
    "no column for the class": ([["a", "b"], *([1, 2] for _ in range(9))], "which column is the class"),
    "more classes than classes can be": (changed(ILL, lambda i, r: f"D{i}", 240), "too many for classes"),
    # ambiguous
    "spelling of a class": (
        changed(ILL, lambda i, r: "Krank" if i == 3 else r[ILL]),
        r"classes 'krank' \(39\) and 'Krank' \(1\) may be one; if so: labels: {Krank: krank}",
    ),
    "blanks in a class": (
        changed(ILL, lambda i, r: "kr ank" if i == 3 else r[ILL]),
        "labels: {kr ank: krank}",
    ),
    "one number as two classes": (
        changed(ILL, lambda i, r: ("0.0" if i < 9 else "0") if r[ILL] == "krank" else "1"),
        r"classes '0.0' \(3\) and '0' \(37\) may be one",
    ),
    "spelling of a category": (
        changed(2, lambda i, r: "W" if i == 3 else r[2]),
        r"column 'geschlecht' has 'w' \(\d+\) and 'W' \(1\) as categories of their own",
    ),
    "0 and 0.0 in a category": (
        column("stufe", lambda i, r: ["0", "0.0", "hoch"][i % 3]),
        "'0' .* and '0.0' .* as categories of their own",
    ),
    "-999": (
        changed(1, lambda i, r: "-999" if i % 11 == 0 else r[1]),
        "holds -999 in 11 rows.*missing: .'-999'",
    ),
    "-999.0": (changed(1, lambda i, r: "-999.0" if i == 5 else r[1]), "holds -999 in 1 rows.*'-999.0'"),
    "999": (changed(0, lambda i, r: "999" if i % 9 == 0 else r[0]), "'alter' holds 999 in 14 rows"),
    "-9": (changed(1, lambda i, r: "-9" if i == 5 else r[1]), "'druck' holds -9 in 1 rows"),
    "-1 as an age": (changed(0, lambda i, r: "-1" if i == 5 else r[0]), "'alter' holds -1 in 1 rows"),
    "9999 and -99": (
        changed(1, lambda i, r: {4: "9999", 9: "-99"}.get(i, r[1])),
        "holds -99 in 1 rows.*holds 9999 in 1 rows",
    ),
    "a word for unknown": (
        changed(3, lambda i, r: "unbekannt" if i < 5 else r[3]),
        "holds 'unbekannt' 5 times",
    ),
    "a sign for unknown": (changed(3, lambda i, r: "-" if i < 5 else r[3]), "holds '-' 5 times"),
    "a quantity as label": (
        changed(ILL, lambda i, r: f"{i / 7 % 3:.2f}"),
        "look like a quantity and no classes",
    ),
    "an age as label": (
        changed(ILL, lambda i, r: 30 + i % 45),
        "45 different numbers, 30 to 74, which look like",
    ),
    "codes of numbers": (
        column("stadium", lambda i, r: i % 4 + 1),
        "few whole numbers, taken for codes; delete",
    ),
    "a measurement called no": (
        column("NO", lambda i, r: f"{20 + i * 0.137:.3f}"),
        r"^(?!.*\"?NO\"?: ignore).*5 columns become features",
    ),
    "an identifier": (
        column("Labor-Nr", lambda i, r: 7000 + i),
        "Labor-Nr: ignore # another value in each row",
    ),
    "Patient-Nr": (
        column("Patient-Nr", lambda i, r: 500 + i // 3),
        "'Patient-Nr' looks like an identifier: 40 values in 120 rows.*if so: patient: Patient-Nr",
    ),
    "pid": (
        column("pid", lambda i, r: f"P{i // 2}"),
        "'pid' looks like an identifier: 60 values.*patient: pid",
    ),
    "Fall Nr": (
        column("Fall Nr", lambda i, r: i // 2),
        "'Fall Nr' looks like an identifier.*# patient: Fall Nr",
    ),
    "subjectId": (column("subjectId", lambda i, r: i // 4 + 0.0), "'subjectId' looks like an identifier: 30"),
    "an identifier beside the patient": (
        [
            ["patient", *row] if not n else [f"p{n // 2}", *row]
            for n, row in enumerate(column("pid", lambda i, r: i // 2))
        ],
        "'pid' looks like an identifier.*says nothing of a new patient",
    ),
    "two decimal signs": (
        column("wert", lambda i, r: f"{i},5"),
        "column 'wert' holds numbers with a comma such as '0,5'.*--decimal ,",
    ),
    # leaking
    "days": (
        column("days", lambda i, r: 10 + i if r[ILL] == "krank" else 900 + i),
        "column 'days' alone tells the class rightly in 100 %.*column_kinds: {days: ignore}",
    ),
    "event": (column("event", lambda i, r: int(r[ILL] == "krank")), "column 'event' alone tells the class"),
    "diag_code": (
        column("diag_code", lambda i, r: ("I21" if r[ILL] == "krank" else "Z00") + f".{i % 4}"),
        "column 'diag_code' alone tells",
    ),
    "what is missing": (
        column("troponin", lambda i, r: f"{i * 7919 % 113 / 10:.1f}" if r[ILL] == "krank" else ""),
        "column 'troponin' is filled for",
    ),
    "nearly always": (
        column("therapie", lambda i, r: "OP" if (r[ILL] == "krank") != (i == 50) else "keine", 300),
        "column 'therapie' alone tells the class rightly in (98|99|100) %",
    ),
    "a range of numbers": (
        column("score", lambda i, r: 5 if r[ILL] == "krank" else [1, 9][i % 2]),
        "column 'score' alone tells",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_s_fault_is_named(name: str, tmp_path: Path) -> None:
    rows, expected = TABLES[name]
    found = said(write(tmp_path / "tabelle.csv", rows))
    assert re.search(expected, found), found


def _bytes(content: bytes) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / "t.csv").write_bytes(content)
        return root / "t.csv"

    return make


def _german(root: Path) -> Path:
    rows = [
        [cell.replace(".", ",") for cell in row]
        for row in column("tage", lambda i, r: f"{i + 500 * (r[ILL] == 'krank')}.5")
    ]
    return write(root / "t.csv", rows, ";")


def _cells(root: Path) -> Path:
    return write(root / "t.csv", changed(1, lambda i, r: "hoch" if i == 5 else r[1]))


def _sites(root: Path) -> Path:
    return write(root / "t.csv", column("klinik", lambda i, r: "A" if r[ILL] == "krank" else "B"))


def _empty_at(root: Path) -> Path:
    rows = column("klinik", lambda i, r: "AB"[i % 2])
    return write(root / "t.csv", [[r[0], r[1], "" if r[0] == "A" else r[2], *r[3:]] for r in rows])


def _nobody(root: Path) -> Path:
    return write(root / "t.csv", column("patient", lambda i, r: f"p{i}" if i != 5 else ""))


def _one(root: Path) -> Path:
    return write(root / "t.csv", changed(ILL, lambda i, r: "krank"))


def _both(root: Path) -> Path:
    folder(root / "bilder", "Neutrophil", "monocyte")
    image(root / "bilder" / "neutrophil" / "a.png", 77)
    return root / "bilder"


def _twice(root: Path) -> Path:
    folder(root / "bilder", "mel", "nv")
    image(root / "bilder" / "mel" / "doppelt.png", 7)
    image(root / "bilder" / "nv" / "auch.png", 7)
    return root / "bilder"


def _across(root: Path) -> Path:
    folder(root / "bilder", "train/mel", "train/nv", "test/mel", "test/nv")
    for part in ("train", "test"):
        image(root / "bilder" / part / "nv" / "gleich.png", 4242)
    return root / "bilder"


def _with(name: str, level: int | None = None, *names: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        folder(root / "bilder", *(names or ("mel", "nv")))
        image(root / "bilder" / name, 9, level)
        return root / "bilder"

    return make


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        folder(root / "bilder", "mel", "nv")
        (root / "bilder" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "bilder" / name).write_bytes(content)
        return root / "bilder"

    return make


def _loop(root: Path) -> Path:
    folder(root / "bilder", "mel", "nv")
    os.symlink(root / "bilder", root / "bilder" / "mel" / "alles")
    return root / "bilder"


def _empty_class(root: Path) -> Path:
    (folder(root / "bilder", "mel", "nv") / "bcc").mkdir()
    return root / "bilder"


def _manifest(*rows: list[str], header: str = "path,label,split") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        folder(root, "mel", "nv")
        listed = [[f"{name}/{index}.png", name, "train"] for name in ("mel", "nv") for index in range(8)]
        return write(root / "liste.csv", [header.split(","), *listed, *rows])

    return make


def _npz(**arrays: Any) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        np.savez(root / "a.npz", **arrays)
        return root / "a.npz"

    return make


X, Y = np.arange(80, dtype=np.float32).reshape(20, 4), np.arange(20) % 2
OTHERS: dict[str, tuple[Callable[[Path], Path], bool, str]] = {
    # in check as well as in init
    "a workbook": (_bytes(b"PK\x03\x04abc"), False, "a workbook or an archive"),
    "null characters": (_bytes("a,label\n1,x\n".encode("utf-16-le")), False, "null characters"),
    "nothing there": (lambda root: root / "t.csv", False, "no such file or folder"),
    "a German leak": (_german, True, "column 'tage' alone tells the class rightly in 100 %"),
    "a cell that is no number": (_cells, True, "line 7: 'hoch' is not a number"),
    "sites with a class each": (_sites, True, "site 'A' holds one class alone, 'krank'"),
    "a column empty at a site": (_empty_at, True, "column 'druck' is empty at A"),
    "a record of nobody": (_nobody, True, "the patient is empty"),
    "one class": (_one, True, "is the only class"),
    "Neutrophil beside neutrophil": (_both, False, "labels: {neutrophil: Neutrophil}"),
    "the same in check": (_both, True, "labels: {neutrophil: Neutrophil}"),
    "joined names": (
        _with("basal_cell/a.png", None, "basal cell", "nv"),
        False,
        "labels: {basal_cell: basal cell}",
    ),
    "an archive's folder": (
        _with("__MACOSX/mel/a.png"),
        True,
        "folders that archives leave,? left out.*__MACOSX",
    ),
    "an archive's folder in init": (_with("__MACOSX/mel/a.png"), False, "are left out, the first .*__MACOSX"),
    "a hidden folder": (_with("mel/.thumbs/a.png"), True, "left out.*thumbs"),
    "a black image": (
        _with("mel/leer.png", 0),
        True,
        "1 images have one colour in all pixels, the first mel/leer",
    ),
    "a red image": (_with("nv/rot.png", 200), False, "1 images have one colour in all pixels"),
    "an image under two classes": (_twice, True, "more than once, under two classes: .*doppelt.png"),
    "an image on both sides": (_across, True, "on both sides of a split: .*gleich.png"),
    "a damaged image": (_file("mel/x.png", b"\x89PNG\r\n"), True, "x.png"),
    "an image without a class": (_with("lose.png"), False, "an image outside of class folders"),
    "sites or classes": (_with("A/mel/a.png", None, "A/mel", "B/nv"), False, "what are the first folders"),
    "an empty class": (_empty_class, True, "bcc"),
    "a link around itself": (_loop, True, "links to a folder around them"),
    "parts that are no classes": (
        _with("val/mel/1.png", None, "train/mel", "val/nv"),
        True,
        "what are the first folders|parts and no",
    ),
    "an image that is not there": (_manifest(["mel/99.png", "mel", "train"]), True, "99.png"),
    "a label that is empty": (_manifest(["mel/0.png", "", "train"]), True, "label is empty"),
    "a part of another name": (_manifest(["mel/0.png", "mel", "dev"]), True, "'dev' must be train or test"),
    "arrays without labels": (_npz(x=X), False, "no arrays x and y"),
    "labels of other length": (_npz(x=X, y=Y[:7]), True, "shape"),
    "objects in an array": (_npz(x=X, y=np.array([None] * 20)), False, "not an .npz file of plain arrays"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_s_or_folder_s_fault_is_named(name: str, tmp_path: Path) -> None:
    make, check, expected = OTHERS[name]
    found = said(make(tmp_path), check)
    assert re.search(expected, found), found


def test_tidy_data_are_asked_about_nothing(tmp_path: Path) -> None:
    sets = [
        write(tmp_path / "tidy.csv", tidy()),
        write(tmp_path / "signed.csv", column("change", lambda i, r: i % 13 - 6)),
        write(tmp_path / "codes.csv", column("grade", lambda i, r: i * 7 % 10)),
        write(tmp_path / "patients.csv", column("patient_id", lambda i, r: f"p{i // 2}")),
        write(tmp_path / "numbered.csv", changed(ILL, lambda i, r: i * 7 % 30)),
        folder(tmp_path / "images", "mel", "nv", "bcc"),
        folder(tmp_path / "sites", "A/mel", "A/nv", "B/mel", "B/nv"),
    ]
    for path in sets:
        for check in (False, True):
            found = said(path.rename(path.with_name(f"{check}-{path.name}")), check)
            assert "question" not in found, found
            path.with_name(f"{check}-{path.name}").rename(path)


def test_an_answer_is_written_and_asked_for_no_more(tmp_path: Path) -> None:
    asked = list[str]()

    def ask(question: str, allowed: object) -> str:
        asked.append(question)
        return "no" if "event" in question else "yes"

    rows = column("Patient-Nr", lambda i, r: 500 + i // 3)
    rows = [[*row[:-1], "Krank" if n == 3 else row[-1]] for n, row in enumerate(rows)]
    rows = [["event" if not n else int(row[-1].lower() == "krank"), *row] for n, row in enumerate(rows)]
    rows = [[*row[:3], "-999" if n == 5 else row[3], *row[4:]] for n, row in enumerate(rows)]
    rows = [["days" if not n else n + 900 * row[0], *row] for n, row in enumerate(rows)]
    path = write(tmp_path / "t.csv", rows)
    init_command(path, tmp_path / "first", "", ask=ask)
    data = yaml.safe_load((tmp_path / "first" / "experiment.yaml").read_text())["data"]
    assert data["patient"] == "Patient-Nr" and data["labels"] == {"Krank": "krank"}
    assert data["missing"] == ["-999"] and data["column_kinds"] == {"days": "ignore"}
    assert len(asked) == 5
    done = CliRunner().invoke(app, ["check", str(tmp_path / "first" / "experiment.yaml")])
    questions = [line for line in done.output.splitlines() if "question:" in line]
    assert len(questions) == 1 and "'event' alone tells" in questions[0], "what was answered no is still said"
