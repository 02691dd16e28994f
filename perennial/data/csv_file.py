"""CSV files as people have them: their separator, encoding and decimal sign, and their cells as texts.

Nothing here depends on how many rows look a certain way: what one cell is read as never follows from another,
but for a decimal comma, which a file uses everywhere or nowhere.
"""

import codecs
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from perennial.foundation.errors import DataError

Decimal = Literal[".", ","]
SEPARATORS = ",;\t"
LEGACY = "cp1252"
"""Windows-1252, which holds Latin-1: what spreadsheets of western Europe wrote before UTF-8."""

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_COMMA_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+)?,\d+([eE][-+]?\d+)?")
_POINT_NUMBER = re.compile(r"[-+]?\d+\.\d+([eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")
_WHOLE = re.compile(r"[-+]?\d+")
_ODD_NUMBER = re.compile(
    r"(?P<limit>[<>\u2264\u2265]=?)?\s*(?P<number>[-+]?(\d[\d.]*)?[.,]?\d+([eE][-+]?\d+)?)\s*"
    r"(?P<unit>([^\W\d_]{1,6}|[%\u00b0][CF]?)?( ?/ ?[^\W\d_]{1,6})?)"
)
"""A number, which may stand behind < or >, or before a unit."""
_LETTERS = frozenset("glmsKUd%\u00b0")
"""Units of one sign; another letter behind digits is more often a stage, as in 3a."""
MOSTLY = 0.8
"""A column of which at least this share of the cells are numbers is meant to hold numbers, dates likewise."""
FRAMES: dict[str, tuple[str, dict[str, None]]] = {
    # of types that follow from the first thousand rows alone, a later text would be lost in silence
    ".xlsx": ("read_excel", {"infer_schema_length": None}),
    ".parquet": ("read_parquet", {}),
}
"""Files that polars reads, whose cells are texts here as those of CSV files are."""
_WORKBOOK = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")


@dataclass(frozen=True)
class CsvFile:
    """The cells of one file.

    columns: name -> (N,) texts (StringDType) without surrounding space. lines: where each row ends in the
    file. decimal: the sign between units and tenths. separator: of cells; '' in a sheet or Parquet file.
    notes: what was assumed.
    """

    path: Path
    columns: dict[str, np.ndarray]
    lines: list[int]
    decimal: Decimal = "."
    notes: tuple[str, ...] = ()
    separator: str = ""

    def where(self, row: int) -> str:
        """File and line of a row, for errors."""
        return f"{self.path}, line {self.lines[row]}"

    def clean(self, units: Mapping[str, str], limits: Sequence[str]) -> "CsvFile":
        """The same with bare numbers where a column's numbers have this unit, or stand behind < or >."""
        columns = dict(self.columns)
        for name in {*units, *limits} & columns.keys():
            found, place = np.unique(columns[name], return_inverse=True)
            bare = []
            for text in found.tolist():
                match = _ODD_NUMBER.fullmatch(text)
                fits = match is not None and match["unit"] in ("", units.get(name))
                fits = fits and (match["limit"] is None or name in limits)  # pyright: ignore
                bare.append(match["number"] if match is not None and fits else text)
            columns[name] = np.array(bare, dtype=np.dtypes.StringDType())[place]
        return replace(self, columns=columns)


def read_csv(
    path: Path,
    decimal: Decimal | None = None,
    units: Mapping[str, str] | None = None,
    limits: Sequence[str] = (),
) -> CsvFile:
    """Read a CSV file whose first line names the columns, or a sheet or Parquet file as if it were one.

    The text is UTF-8, or UTF-16 where the file is marked so, or else Windows-1252 with a note.
    decimal: None takes the comma where the separator is another sign and a cell is such a number.
    units: column -> the unit behind its numbers. limits: columns in which `<0.5` counts as 0.5.
    The separator is the comma, semicolon or tab that the header has most of.
    Raises DataError naming the file and line where it is no table.
    """
    if path.suffix.lower() in FRAMES:
        return _of_frame(path).clean(units or {}, limits)
    text, notes = _read_text(path)
    separator = max(SEPARATORS, key=io.StringIO(text, newline="").readline().count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    names, numbered = _drop_empty_columns(names, numbered)
    lines = _require_rows(path, names, numbered)
    columns = {
        # not as wide as the longest text: one long cell would make every row take its width
        name: np.strings.strip(np.array(values, dtype=np.dtypes.StringDType()))
        for name, values in zip(names, zip(*(row for _, row in numbered), strict=True), strict=True)
    }
    found = decimal or (_detect_decimal(columns) if separator != "," else ".")
    if found == "," and decimal is None:
        notes = (*notes, f"{path}: numbers have a decimal comma; otherwise set data.decimal to '.'")
    return CsvFile(path, columns, lines, found, notes, separator).clean(units or {}, limits)


def require_rows_apart(path: Path, decimal: Decimal | None) -> None:
    """Raises DataError unless each row of a table is read by itself, so that none decides how another is.

    For a site under a protection. Otherwise one cell may turn the file's encoding, decimal sign or types, and
    one quotation mark take the rows below into its cell.
    """
    alone = "under a protection one row must not decide how the others are read"
    if path.suffix.lower() in FRAMES:
        raise DataError(
            f"{path}: {alone}: in {path.suffix} the types of columns follow from all; save it as CSV"
        )
    text, notes = _read_text(path)
    if notes:
        raise DataError(f"{path}: not in UTF-8, and {alone}; save it as UTF-8")
    lines = io.StringIO(text, newline="")
    header = next(lines, "")
    if decimal is None and max(SEPARATORS, key=header.count) != ",":
        raise DataError(f"{path}: data.decimal: missing, allowed '.' or ',', because {alone}")
    for number, line in enumerate(lines, 2):
        if line.count('"') % 2:
            raise DataError(f"{path}, line {number}: a quotation mark without its other one; {alone}")


def _of_frame(path: Path) -> CsvFile:
    """The first sheet of a workbook, or a Parquet file, with its cells as texts."""
    try:
        import polars  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{path}: a file of this kind needs perennial-fl[sheets]; or save it as CSV (in UTF-8) first"
        ) from None
    try:
        read, options = FRAMES[path.suffix.lower()]
        frame = getattr(polars, read)(path, **options)
    except Exception as error:  # whatever the reader's own library raises
        raise DataError(f"{path}: cannot be read as {path.suffix} ({error})") from error
    texts = frame.select(polars.all().cast(polars.String)).fill_null("")
    names = [name.strip() for name in texts.columns]
    rows = [(place + 2, [*row]) for place, row in enumerate(texts.iter_rows()) if any(row)]
    lines = _require_rows(path, names, rows)
    columns = {
        name: np.strings.strip(np.array(values, dtype=np.dtypes.StringDType()))
        for name, values in zip(names, zip(*(row for _, row in rows), strict=True), strict=True)
    }
    return CsvFile(path, columns, lines)


def find_odd_numbers(texts: np.ndarray) -> tuple[str, bool]:
    """(the unit behind the numbers of a column's cells or '', whether some stand behind < or >).

    ('', False) where the cells are mostly no numbers, or have several units.
    """
    found, counts = np.unique(texts, return_counts=True)
    matches = [_ODD_NUMBER.fullmatch(text) for text in found.tolist()]
    numbers = sum(count for match, count in zip(matches, counts.tolist(), strict=True) if match)
    units = {match["unit"] for match in matches if match and match["unit"]}
    stage = any(len(unit) == 1 and unit not in _LETTERS for unit in units)
    if len(units) > 1 or stage or numbers < MOSTLY * len(texts):
        return "", False
    return next(iter(units), ""), any(match["limit"] for match in matches if match)


def _read_text(path: Path) -> tuple[str, tuple[str, ...]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if content.startswith(_WORKBOOK):
        raise DataError(
            f"{path}: not a CSV file but a workbook or an archive; save the sheet as CSV (in UTF-8) or .xlsx"
        )
    marked = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    try:
        text = content.decode(marked or "utf-8")
        notes: tuple[str, ...] = ()
    except UnicodeError as error:
        if marked is not None:
            raise DataError(f"{path}: not a CSV file in {marked} ({error})") from error
        try:
            text = content.decode(LEGACY)
        except UnicodeDecodeError:
            raise DataError(f"{path}: not a CSV file in UTF-8 ({error}); save it so") from error
        notes = (f"{path}: not in UTF-8 and read as Windows-1252 (Latin-1); else save it as UTF-8",)
    if "\0" in text:
        raise DataError(f"{path}: not a CSV file in UTF-8 (it holds null characters); save it so")
    return text, notes


def _drop_empty_columns(
    names: list[str], numbered: list[tuple[int, list[str]]]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Without columns at the end that have neither a name nor a cell, as spreadsheets leave them."""
    width = len(names)
    while width > 1 and not names[width - 1] and not any(any(row[width - 1 :]) for _, row in numbered):
        width -= 1
    if width == len(names):
        return names, numbered
    return names[:width], [(line, row[:width] if len(row) == len(names) else row) for line, row in numbered]


def _require_rows(path: Path, names: Sequence[str], numbered: Sequence[tuple[int, list[str]]]) -> list[int]:
    if not numbered:
        raise DataError(f"{path}: the table has no row")
    if "" in names or len(set(names)) != len(names):
        unnamed = " (a column without a name may be the row numbers of the program that wrote the file)"
        raise DataError(
            f"{path}: the header must name every column once; found {', '.join(map(repr, names))}"
            f"{unnamed if '' in names else ''}"
        )
    for line, row in numbered:
        if len(row) != len(names):
            raise DataError(
                f"{path}, line {line}: {len(row)} values for {len(names)} columns; a value that holds the "
                "separator stands in double quotes"
            )
    return [line for line, _ in numbered]


def _detect_decimal(columns: dict[str, np.ndarray]) -> Decimal:
    for values in columns.values():
        for text in np.unique(values[np.strings.find(values, ",") >= 0]).tolist():
            match = _ODD_NUMBER.fullmatch(text)
            if match is not None and _COMMA_NUMBER.fullmatch(match["number"]):
                return ","
    return "."


def has_other_decimal(texts: np.ndarray, decimal: Decimal) -> bool:
    """Whether all texts, (N,), are numbers, some of which cannot be read for sure with the file's sign."""
    number, unsure = (_COMMA_NUMBER,) * 2 if decimal == "." else (_POINT_NUMBER, _THOUSANDS)
    found = np.unique(texts).tolist()
    return any(map(unsure.fullmatch, found)) and all(
        number.fullmatch(text) or _WHOLE.fullmatch(text) for text in found
    )


def normalise_decimals(texts: np.ndarray, decimal: Decimal) -> np.ndarray:
    """(N,) texts in which numbers have a decimal point and no points between thousands.

    decimal: the sign that they have now; among commas, a point that cannot stand between thousands is one
    too. Texts that are no such numbers come out as texts that are none.
    """
    if decimal == ".":
        return texts
    comma, point = np.strings.find(texts, ",") >= 0, np.strings.find(texts, ".") >= 0
    if not (comma.any() or point.any()):
        return texts
    found = texts.copy()
    for row in np.flatnonzero(comma | point).tolist():
        text = str(texts[row])
        if _COMMA_NUMBER.fullmatch(text) is not None:
            found[row] = text.replace(".", "").replace(",", ".")
        # 57.0 has a decimal point; in 1.234 it could stand between thousands: that text is left no number
        elif _POINT_NUMBER.fullmatch(text) is None or _THOUSANDS.fullmatch(text) is not None:
            found[row] = f"'{text}'"
    return found
