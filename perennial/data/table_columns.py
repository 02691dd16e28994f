"""What the columns of a table are: numbers, dates or categories, and how their cells become numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256

import numpy as np

from perennial.data.csv_file import MOSTLY, CsvFile, has_other_decimal, normalise_decimals
from perennial.foundation.errors import DataError, suggest_nearest

MISSING = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")
MOST_CATEGORIES = 100
"""A discovered column with more distinct texts than this is an identifier or free text, not a category."""
HASHES = 32
"""Parts into which the texts of a column of more categories are hashed."""
MOST_BAD_CELLS = 10

Kind = str | tuple[str, ...]
Columns = dict[str, Kind]
"""Column -> "numeric", "date", or its categories."""
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?")
_DOTTED = re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}")
_SLASHED = re.compile(r"\d{1,4}/\d{1,2}/\d{1,4}")
_ICD = re.compile(r"[A-TV-Z]\d[\dA-Z](\.?[\dA-Z]{1,4})?|\d{3}(\.\d{1,2})?|[EV]\d{2,4}(\.\d{1,2})?")
"""Codes of ICD-10 and ICD-9."""
_LETTERED = re.compile(r"[A-Z]\d{2}")
_PREFIX, _HASH = re.compile(r"(.+)\*"), re.compile(r"#(\d+)/(\d+)")
_EPOCH = datetime(1970, 1, 1)


def mask_missing(texts: np.ndarray, missing: Sequence[str] = ()) -> np.ndarray:
    """(N,) bool: whether each cell is missing. missing: texts that mean so beside the usual ones."""
    return np.isin(texts, np.array([*MISSING, *missing], dtype=texts.dtype))


def discover(
    file: CsvFile, names: Sequence[str], given: Mapping[str, str], missing: Sequence[str]
) -> Columns:
    """The kind of each of these columns, as far as the data show it: numeric, date, or the categories.

    given: column -> numeric, date, category, or ignore, which leaves it out. missing: texts of no value.

    A column is numeric if at least MOSTLY of its cells that hold something are numbers, and likewise for
    dates; reading then names the other cells. Otherwise its distinct texts are categories; of more than
    MOST_CATEGORIES, ICD codes are grouped by their first characters (`I21*`) and others by a hash (`#7/32`),
    unless most rows have a text of their own. Raises DataError on a column that is none of these, or without
    any feature.
    """
    columns: Columns = {}
    for name in names:
        kind = given.get(name)
        if kind == "ignore":
            continue
        texts = file.columns[name]
        present = texts[~mask_missing(texts, missing)]
        if kind is None:
            if has_other_decimal(present, file.decimal):
                raise DataError(_describe_decimals(file, name, present))
            kind = _infer_kind(
                f"{file.path}: column {name!r}", present, normalise_decimals(present, file.decimal)
            )
            if kind == "many":
                columns[name] = _choose_groups(present)
                continue
        columns[name] = tuple(_list_categories(present)) if kind == "category" else kind
    if not columns:
        raise DataError(f"{file.path}: no feature beside the label")
    return columns


def _describe_decimals(file: CsvFile, name: str, present: np.ndarray) -> str:
    said = {",": "comma", ".": "point"}
    other = "," if file.decimal == "." else "."
    example = next(text for text in present.tolist() if other in text)
    return (
        f"{file.path}: column {name!r} holds numbers with a {said[other]} such as {example!r}, where the "
        f"file's decimal sign is the {said[file.decimal]}; write them alike, set data.decimal if all columns "
        f"have a {said[other]}, or say what the column is in data.column_kinds: category or ignore"
    )


def _infer_kind(where: str, present: np.ndarray, numbers: np.ndarray) -> str:
    count = len(np.unique(present))
    codes = (
        count > MOST_CATEGORIES and _share(present, lambda text: _ICD.fullmatch(text) is not None) >= MOSTLY
    )
    if codes and any(map(_LETTERED.match, np.unique(present).tolist())):
        return "many"
    if _share(numbers, is_number) >= MOSTLY:
        return "numeric"
    if _share(present, lambda text: _parse_date(text) is not None) >= MOSTLY:
        return "date"
    if _share(present, lambda text: _SLASHED.fullmatch(text) is not None) >= MOSTLY:
        raise DataError(
            f"{where} holds dates such as {str(present[0])!r}, in which day and month cannot be told apart; "
            "write them as 2024-12-31, or leave the column out with data.column_kinds: ignore"
        )
    if count > MOST_CATEGORIES and 2 * count <= len(present):
        return "many"
    if count > MOST_CATEGORIES:
        raise DataError(
            f"{where} has {count} distinct texts, too many for categories; leave it out with "
            "data.column_kinds: ignore, or list the features in data.columns"
        )
    return "category"


def _share(texts: np.ndarray, fits: Callable[[str], bool]) -> float:
    """Of the cells that fit. 1 for a column without any, which is numbers."""
    found, counts = np.unique(texts, return_counts=True)
    right = sum(count for text, count in zip(found.tolist(), counts.tolist(), strict=True) if fits(text))
    return right / len(texts) if len(texts) else 1.0


def _list_categories(present: np.ndarray) -> list[str]:
    """The distinct texts; of codes that are numbers, one text for each number, in their order."""
    found = np.unique(present).tolist()
    if not all(map(is_number, found)):
        return found
    by_value: dict[float, str] = {}
    for text in found:
        value = float(text)
        by_value.setdefault(value, str(int(value)) if value.is_integer() else text)
    return [by_value[value] for value in sorted(by_value)]


def _choose_groups(present: np.ndarray) -> tuple[str, ...]:
    """Groups of many categories: of ICD codes the first characters, else parts by a hash."""
    found = np.unique(present).tolist()
    for length in (
        (3, 2, 1) if _share(present, lambda text: _ICD.fullmatch(text) is not None) >= MOSTLY else ()
    ):
        starts = sorted({text[:length] for text in found if _ICD.fullmatch(text)})
        if len(starts) <= MOST_CATEGORIES:
            return tuple(f"{start}*" for start in starts)
    return tuple(f"#{part}/{HASHES}" for part in range(HASHES))


def describe_groups(kind: Kind | Sequence[str]) -> str:
    """In words, what the categories of a column are groups of; '' where each is one text."""
    if isinstance(kind, str):
        return ""
    if all(map(_PREFIX.fullmatch, kind)):
        return f"many codes, kept as {len(kind)} groups by their first characters"
    return f"many texts, kept as {len(kind)} groups by a hash" if all(map(_HASH.fullmatch, kind)) else ""


def _group_matches(texts: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """(N, K) bool: which group each text belongs to. groups: as _groups() names them."""
    found, row = np.unique(texts, return_inverse=True)
    if hashed := [_HASH.fullmatch(group) for group in groups]:
        parts = [(int(each[1]), int(each[2])) for each in hashed if each]
        if len(parts) == len(groups):
            values = [int.from_bytes(sha256(text.encode()).digest()[:8]) for text in found.tolist()]
            return np.array([[value % n == part for part, n in parts] for value in values])[row]
    starts = [group.removesuffix("*") for group in groups]
    return np.array([[text.startswith(start) for start in starts] for text in found.tolist()])[row]


def is_number(text: str) -> bool:
    """Whether float() reads a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_date(text: str) -> float | None:
    """Days since 1970; None for what is no date that can be read in one way alone, such as 31.12.2024."""
    try:
        if _ISO.fullmatch(text):
            return (datetime.fromisoformat(text) - _EPOCH) / timedelta(days=1)
        if _DOTTED.fullmatch(text):
            return float((datetime.strptime(text, "%d.%m.%Y") - _EPOCH).days)
    except ValueError:
        pass
    return None


class BadCells:
    """Cells that are not of their column's kind: named together, or left empty where that is allowed."""

    def __init__(self, file: CsvFile) -> None:
        self._file = file
        self.rows: set[int] = set()
        self.named: list[str] = []

    def add(self, column: str, row: int, why: str) -> None:
        """Note one bad cell, and why it is bad."""
        text = str(self._file.columns[column][row])
        self.rows.add(row)
        self.named.append(f"column {column!r}, line {self._file.lines[row]}: {text!r} {why}")

    def refuse(self) -> None:
        """Raises DataError naming up to ten of them, if there are any."""
        if not self.named:
            return
        more = len(self.named) - MOST_BAD_CELLS
        shown = "\n  ".join(self.named[:MOST_BAD_CELLS]) + (f"\n  and {more} more" if more > 0 else "")
        remedy = (
            "correct them, list texts that mean a missing value in data.missing, or say what the "
            "column is in "
            "data.column_kinds; unreadable: skip takes them as missing"
        )
        first, *others = self.named
        found = f"{first}; {remedy}" if not others else f"cells that cannot be read:\n  {shown}\n{remedy}"
        raise DataError(f"{self._file.path}, {found}" if not others else f"{self._file.path}: {found}")


def encode(
    file: CsvFile, columns: Mapping[str, str | Sequence[str]], missing: Sequence[str], bad: BadCells
) -> np.ndarray:
    """(N, D) float32: for each number or date its value (NaN if missing) and an indicator of missing ones.

    For each column of categories its one-hot code, whose last entry stands for unknown or missing. Cells that
    cannot be read are missing, and are added to bad.
    Raises DataError on a column that the file does not have.
    """
    parts = []
    for name, kind in columns.items():
        if name not in file.columns:
            hint = suggest_nearest(name, file.columns)
            raise DataError(f"{file.path}: no column {name!r}{hint}; data.columns lists it")
        texts = file.columns[name]
        if isinstance(kind, str):
            values = (_parse_dates if kind == "date" else _parse_numbers)(
                file, name, mask_missing(texts, missing), bad
            )
            parts += [values[:, None], np.isnan(values)[:, None]]
        else:
            known = _match_categories(texts, kind)
            if describe_groups(kind):
                known = _group_matches(texts, kind) & ~mask_missing(texts, missing)[:, None]
            parts += [known, ~known.any(axis=1, keepdims=True)]
    return np.concatenate(parts, axis=1, dtype=np.float32)


def _match_categories(texts: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    """(N, K) bool: which category each text is. Codes that are numbers are compared as numbers: 1.0 is 1."""
    if all(map(is_number, categories)):
        codes = [float(text) for text in categories]
        if len(set(codes)) == len(codes):
            found, row = np.unique(texts, return_inverse=True)
            values = [float(text) if is_number(text) else float("nan") for text in found.tolist()]
            return np.array(values)[row][:, None] == np.array(codes)[None, :]
    return texts[:, None] == np.array(categories)[None, :]


def _parse_numbers(file: CsvFile, name: str, empty: np.ndarray, bad: BadCells) -> np.ndarray:
    """float32, NaN where missing."""
    texts = np.where(empty, "nan", normalise_decimals(file.columns[name], file.decimal))
    with np.errstate(over="ignore"):
        try:
            values = texts.astype(np.float64).astype(np.float32)
        except ValueError:
            for row in [row for row, text in enumerate(texts.tolist()) if not is_number(text)]:
                bad.add(name, row, "is not a number")
                texts[row], empty[row] = "nan", True
            values = texts.astype(np.float64).astype(np.float32)
    for row in np.flatnonzero(~empty & ~np.isfinite(values)).tolist():
        bad.add(name, row, "is not a finite number")
        values[row] = np.nan
    return values


def _parse_dates(file: CsvFile, name: str, empty: np.ndarray, bad: BadCells) -> np.ndarray:
    """float32 days since 1970, NaN where missing."""
    texts = file.columns[name]
    found, row = np.unique(texts, return_inverse=True)
    days = [_parse_date(text) for text in found.tolist()]
    values = np.array([np.nan if day is None else day for day in days], dtype=np.float32)[row]
    for wrong in np.flatnonzero(np.isnan(values) & ~empty).tolist():
        bad.add(name, wrong, "is not a date such as 2024-12-31 or 31.12.2024")
    values[empty] = np.nan
    return values


def count_features(columns: Mapping[str, str | Sequence[str]]) -> int:
    """D: a value and an indicator for each number or date; for each other its categories and one more."""
    return sum(2 if isinstance(kind, str) else len(kind) + 1 for kind in columns.values())


def name_features(columns: Mapping[str, str | Sequence[str]]) -> list[str]:
    """What each of the D features of encode() is: `age`, `age is missing`, `sex = f`, `sex is none of these`.

    For people: two features may have the same name where a category has the name of another column.
    """
    found = list[str]()
    for name, kind in columns.items():
        if isinstance(kind, str):
            days = ", days since 1970-01-01" if kind == "date" else ""
            found += [f"{name}{days}", f"{name} is missing (0 or 1)"]
        else:
            found += [f"{name} = {category} (0 or 1)" for category in kind]
            found.append(f"{name} is missing or none of these (0 or 1)")
    return found


def locate_features(columns: Mapping[str, str | Sequence[str]]) -> dict[str, range]:
    """Indices of each column's features among the D features of encode()."""
    found, start = {}, 0
    for name, kind in columns.items():
        found[name] = range(start, start + count_features({name: kind}))
        start = found[name].stop
    return found


def locate_numbers(columns: Mapping[str, str | Sequence[str]]) -> dict[str, int]:
    """Column of numbers or dates -> index of its value among the D features of encode.

    Names would not tell the features apart: a category may be called "other", and a column "age missing".
    """
    ranges = locate_features(columns)
    return {name: ranges[name].start for name, kind in columns.items() if isinstance(kind, str)}
