"""What in somebody's data may not be what it seems: questions, each with the YAML line that answers it.

Nothing here is decided: a column that tells the class, an identifier that repeats, a code that stands for
nothing. Whoever knows the data answers, in `init` or in the file.
"""

import re
import shlex
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from perennial.data import csv_file
from perennial.data.config import DataConfig
from perennial.data.csv_file import CsvFile, normalise_decimals, read_csv
from perennial.data.leaks import (
    ALMOST,
    APART,
    find_filled_class,
    find_telling_pairs,
    is_outcome,
    score_column,
)
from perennial.data.refused import describe_joined_classes
from perennial.data.site import Part, SiteData
from perennial.data.table_columns import MOSTLY, is_number, mask_missing

Value = str | Sequence[str] | Mapping[str, str]
NEARLY = 0.97
"""Mean share of each class that one column alone tells rightly; from here on it is asked about."""
LEAST_ROWS = 40
MOST_ROWS = 4_000
"""Rows that the search for such a column looks at."""
MOST_COLUMNS = 500
"""Of a wider table, which holds measurements of one kind, no single column is looked at so."""
STAND_FOR_NOTHING = frozenset(
    (-1.0, *(sign * nines for sign in (-1, 1) for nines in (9, 99, 999, 9999, 99999)))
)
UNKNOWN = frozenset(
    ("unknown", "unbekannt", "missing", "fehlt", "k.a.", "n.a.", "not available", "-", "--", ".")
)
_PERSON = (
    r"(patient|patienten|patients|pat|subject|subj|proband|probanden|person|case|fall|lesion|mrn|usubjid|p)"
)
_NUMBER = r"(id|ids|nr|no|num|nummer|number|key|code|identifier)"
_IDENTIFIER = re.compile(rf"({_PERSON}{_NUMBER}?|{_NUMBER}|study{_NUMBER})")


PARTS: tuple[Part, ...] = ("train", "validation", "calibration", "test")


@dataclass(frozen=True)
class Suspicion:
    """A question about the data. text: what was found, and what it may mean.

    key, value: the entry of the data block that answers it; key '': none does: put the files right.
    """

    text: str
    key: str = ""
    value: Value = ""

    @property
    def line(self) -> str:
        """The answer as a line of the data block; '' without a key."""
        return answer(self.key, self.value) if self.key else ""

    @property
    def option(self) -> str:
        """The same for the command line of `init`; '' where it has none."""
        if isinstance(self.value, Mapping):
            pairs = [f"{name}={value}" for name, value in self.value.items()]
        else:
            pairs = [self.value] if isinstance(self.value, str) else [*self.value]
        known = self.key in ("missing", "units", "limits", "decimal")
        return " ".join(f"--{self.key} {shlex.quote(each)}" for each in pairs) if known else ""

    def __str__(self) -> str:
        return f"{self.text}; if so: {self.line}" if self.key else self.text


def answer(key: str, value: Value) -> str:
    """`key: value` as one line of YAML."""
    plain = value if isinstance(value, str | Mapping) else list(value)
    shown = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return f"{key}: {shown.strip().removesuffix('...').strip()}"


def find_suspicions(
    config: DataConfig, sites: Mapping[str, SiteData], classes: Sequence[str], test: SiteData | None = None
) -> Iterator[Suspicion]:
    """Yield questions about data that were read.

    sites: one, or all that are simulated. test: of a simulation's server. Real sites are not compared with
    each other.
    """
    first = next(iter(sites.values()))
    if config.source == "csv" and config.path is not None and first.columns is not None:
        path = Path(config.path).expanduser()
        file = read_csv(path, config.decimal, config.units, config.limits)
        yield from inspect_table(
            file,
            config.label_column,
            first.columns,
            config.patient,
            config.missing,
            config.labels,
            config.site_column,
        )
    counts = torch.bincount(first.y, minlength=len(classes)).tolist()
    yield from inspect_names({name: n for name, n in zip(classes, counts, strict=True) if n})
    if config.partition.kind != "natural" and len(sites) > 1:
        parts = {part: torch.cat([site.part(part) for site in sites.values()]) for part in PARTS}
        parts |= {} if test is None else {"test": test.test}
        sites = {"": replace(first, name="the data", **parts)}
    for site in sites.values():
        yield from inspect_records(site, classes)


def inspect_table(
    file: CsvFile,
    label: str,
    columns: Mapping[str, Any],
    patient: str | None,
    missing: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    site: str | None = None,
) -> Iterator[Suspicion]:
    """Yield questions about the columns of a table.

    label: column of labels. columns: feature -> kind, as far as known. patient: the column of patients, if
    one is named. missing, labels: as in DataConfig. site: the column of sites, if there is one.
    """
    given = file.columns[label]
    present = ~mask_missing(given, missing)
    if not labels:
        yield from _inspect_labels(label, given[present])
    for name, kind in columns.items():
        texts = file.columns[name]
        here = ~mask_missing(texts, missing)
        if is_repeated_identifier(name, texts[here]):
            yield ask_whose(name, texts[here], patient)
        elif kind == "numeric":
            yield from _inspect_codes(name, normalise_decimals(texts[here], file.decimal))
        elif not isinstance(kind, str):
            yield from _inspect_spellings(name, texts[here])
    yield from _inspect_leaks(file, given, present, columns, missing, site)


def _inspect_labels(label: str, labels: np.ndarray) -> Iterator[Suspicion]:
    found = np.unique(labels).tolist()
    if len(found) <= 10 or not all(map(is_number, found)):
        return
    values = sorted(map(float, found))
    whole = all(value.is_integer() for value in values)
    numbered = whole and values[0] in (0.0, 1.0) and values[-1] - values[0] + 1 == len(values)
    if not whole or (not numbered and len(labels) < 20 * len(found)):
        yield Suspicion(
            f"column {label!r} holds {len(found)} different numbers, {values[0]:g} to {values[-1]:g}, which "
            "look like a quantity and no classes: cut it in the file, or name another label_column"
        )


def is_identifier(name: str) -> bool:
    """Whether a column has the name of an identifier."""
    words = [word for word in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", name) if word]
    return bool(words) and all(_IDENTIFIER.fullmatch(word.lower()) for word in words)


def is_repeated_identifier(name: str, present: np.ndarray) -> bool:
    """Whether a column is named like an identifier, and its values, `present`, occur in several rows."""
    if not is_identifier(name):
        return False
    found = np.unique(present).tolist()
    return len(found) >= max(10, len(present) / 20) and len(found) < len(present) and not has_decimals(found)


def has_decimals(texts: Sequence[str]) -> bool:
    """Whether all texts are numbers and some have a fraction, as measurements do."""
    return all(map(is_number, texts)) and not all(float(text).is_integer() for text in texts)


def ask_whose(name: str, present: np.ndarray, patient: str | None) -> Suspicion:
    """Ask whether a repeating identifier names patients, or whether to ignore it if `patient` does.

    name, present: of the column, and its values. patient: the column that names patients, if one does.
    """
    text = (
        f"column {name!r} looks like an identifier: {len(np.unique(present))} values in {len(present)} rows"
    )
    if patient is None:
        return Suspicion(f"{text}; it may say whose each row is", "patient", name)
    return Suspicion(f"{text}; it says nothing of a new patient", "column_kinds", {name: "ignore"})


def find_words(present: np.ndarray, file: CsvFile) -> list[str]:
    """Texts without a digit in a column that is meant to hold numbers; `present`: its cells.

    Of texts that usually mean unknown at least half of the other cells are numbers, of others most.
    """
    found, counts = np.unique(present, return_counts=True)
    texts = list(
        zip(found.tolist(), normalise_decimals(found, file.decimal).tolist(), counts.tolist(), strict=True)
    )
    numbers = sum(count for _, point, count in texts if is_number(point))
    words = [text for text, point, _ in texts if not is_number(point) and not any(map(str.isdigit, text))]
    least = 0.5 if all(word.casefold() in UNKNOWN for word in words) else MOSTLY
    return words if numbers >= least * len(present) else []


def ask_about_cells(words: Mapping[str, Sequence[str]]) -> Suspicion:
    """One question on all texts that stand among numbers. words: column -> its texts."""
    every = sorted({word for texts in words.values() for word in texts})
    shown = "; ".join(f"{name}: {', '.join(map(repr, texts[:5]))}" for name, texts in [*words.items()][:8])
    return Suspicion(f"texts among numbers may mean unknown ({shown})", "missing", every)


def ask_about_numbers(file: CsvFile, missing: Sequence[str] = ()) -> list[Suspicion]:
    """Questions on numbers that are not written alike: behind < or >, before a unit, by two decimal signs."""
    units, below, mixed = dict[str, str](), list[str](), dict[str, str]()
    shown = dict[str, str]()
    for name, texts in file.columns.items():
        present = texts[~mask_missing(texts, missing)]
        unit, limits = csv_file.find_odd_numbers(present)
        odd = [text for text in np.unique(present).tolist() if not is_number(text)]
        odd.sort(key=lambda text: text[0] not in "<>\u2264\u2265")
        shown[name] = f"{name}: {', '.join(map(repr, odd[:2]))}"
        units |= {name: unit} if unit else {}
        below += [name] * limits
        cells = file.clean(units, below).columns[name][~mask_missing(texts, missing)]
        if file.decimal == "." and len(cells) and csv_file.has_other_decimal(cells, "."):
            mixed[name] = shown[name]
    found = list[Suspicion]()
    if units:
        said = "; ".join(shown[name] for name in units)
        found.append(
            Suspicion(f"a unit stands behind numbers ({said}) and can be taken away", "units", units)
        )
    if below:
        said = "; ".join(shown[name] for name in below)
        found.append(Suspicion(f"numbers stand behind < or > ({said}); the limit may count", "limits", below))
    if mixed:
        said = "; ".join(mixed.values())
        found.append(Suspicion(f"some numbers have a decimal comma ({said})", "decimal", ","))
    return found


def read_as_answered(file: CsvFile, question: Suspicion) -> CsvFile:
    """The file as it is read after yes to a question of odd_numbers()."""
    if isinstance(question.value, Mapping):
        return file.clean(question.value, ())
    return replace(file, decimal=",") if question.key == "decimal" else file.clean({}, question.value)


def _inspect_codes(name: str, present: np.ndarray) -> Iterator[Suspicion]:
    """Numbers that may stand for an unknown value: nines or -1, far from all others."""
    texts, counts = np.unique(present, return_counts=True)
    values = {text: float(text) for text in texts.tolist() if is_number(text)}
    others = [value for value in values.values() if value not in STAND_FOR_NOTHING]
    if len(others) < 3:
        return
    low, high = min(others), max(others)
    for code in sorted(STAND_FOR_NOTHING & set(values.values())):
        negative = code < 0 <= low and (code != -1 or high - low > 10)
        if negative or code > high + max(2 * (high - low), 1.0):
            spelt = [text for text, value in values.items() if value == code]
            rows = int(counts[np.isin(texts, np.array(spelt, dtype=texts.dtype))].sum())
            yield Suspicion(
                f"column {name!r} holds {code:g} in {rows} rows, and else {low:g} to {high:g}: it may mean "
                "unknown",
                "missing",
                spelt,
            )


def _inspect_spellings(name: str, present: np.ndarray) -> Iterator[Suspicion]:
    found = Counter(present.tolist())
    # codes that are numbers are one category, however they are written
    for several in [] if all(map(is_number, found)) else group_alike(found):
        yield Suspicion(
            f"column {name!r} has {_format_counts(several, found)} as categories of their own; if "
            "they mean one thing, write them alike in the file"
        )
    for text in (text for text in found if text.casefold() in UNKNOWN):
        yield Suspicion(
            f"column {name!r} holds {text!r} {found[text]} times: it may mean unknown", "missing", [text]
        )


def group_alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ in case, spelling of a number, blanks or joining signs alone."""
    found: defaultdict[object, list[str]] = defaultdict(list)
    for name in names:
        plain = unicodedata.normalize("NFKC", name).casefold().strip()
        found[float(plain) if is_number(plain) else re.sub(r"(?<=\w)[\s_-]+(?=\w)", "", plain)].append(name)
    return [group for group in found.values() if len(group) > 1]


def inspect_names(samples: Mapping[str, int]) -> Iterator[Suspicion]:
    """Classes that may be one, or several in one. samples: by class."""
    if text := describe_joined_classes(samples):
        yield Suspicion(text)
    for group in group_alike(samples):
        kept = max(group, key=lambda name: samples[name])
        others = {name: kept for name in group if name != kept}
        yield Suspicion(f"classes {_format_counts(group, samples)} may be one", "labels", others)


def _format_counts(names: Sequence[str], counts: Mapping[str, int]) -> str:
    return " and ".join(f"{name!r} ({counts[name]})" for name in names)


def _inspect_leaks(
    file: CsvFile,
    labels: np.ndarray,
    present: np.ndarray,
    columns: Iterable[str],
    missing: Sequence[str],
    site: str | None,
) -> Iterator[Suspicion]:
    """Columns that may be known only after the class: by name, by being filled, alone, or two together."""
    names = list(columns)
    rows = np.random.default_rng(0).permutation(np.flatnonzero(present))[:MOST_ROWS]
    classes, y = np.unique(labels[rows], return_inverse=True)
    asked = [name for name in names if is_outcome(name)]
    for name in asked:
        yield _ask_to_ignore(name, f"column {name!r} has the name of an outcome")
    if len(rows) < LEAST_ROWS or not 1 < y.max() + 1 <= len(rows) / 10 or len(names) > MOST_COLUMNS:
        return
    shares = dict[str, float]()
    for name in (name for name in names if name not in asked):
        texts = file.columns[name][rows]
        here = ~mask_missing(texts, missing)
        sites = None if site is None else file.columns[site][rows]
        if (found := find_filled_class(texts, y, here, sites)) is not None:
            held, empty = (str(classes[place]) for place in found)
            yield _ask_to_ignore(
                name, f"column {name!r} is filled for {held!r} and mostly empty for {empty!r}"
            )
            asked.append(name)
            continue
        shares[name] = score_column(texts, y, ~here, file)
    for name, share in shares.items():
        others = max((other for key, other in shares.items() if key != name), default=0.5)
        if share >= NEARLY or share >= max(ALMOST, others + APART):
            rightly = f"tells the class rightly in {100 * share:.0f} % of other rows"
            yield _ask_to_ignore(name, f"column {name!r} alone {rightly}")
            asked.append(name)
    left = [name for name in names if name not in asked]
    for one, other, share in find_telling_pairs(file, left, rows, y, missing):
        rightly = f"tell the class rightly in {100 * share:.0f} % of other rows, and neither does alone"
        yield Suspicion(
            f"columns {one!r} and {other!r} together {rightly}; they may be known only after the diagnosis",
            "column_kinds",
            {one: "ignore", other: "ignore"},
        )


def _ask_to_ignore(name: str, found: str) -> Suspicion:
    return Suspicion(f"{found}; it may be known only after the diagnosis", "column_kinds", {name: "ignore"})


def inspect_records(site: SiteData, classes: Sequence[str]) -> Iterator[Suspicion]:
    """Images of one site that lie twice under two classes or on both sides of a split, or show nothing."""
    rows = np.concatenate([site.part(part).cpu().numpy() for part in PARTS])
    if site.x.ndim != 4 or not len(rows):
        return
    part_of = np.repeat(PARTS, [len(site.part(part)) for part in PARTS])
    where = [f"number {row}" if site.places is None else site.places[row] for row in rows.tolist()]
    y, pixels = site.y[rows].tolist(), site.x[rows].flatten(2)
    plain = (pixels.amax(dim=2) == pixels.amin(dim=2)).all(dim=1)
    empty = {*plain.nonzero().flatten().tolist()}
    if empty:
        yield Suspicion(
            f"{site.name}: {len(empty)} images have one colour in all pixels, the first {where[min(empty)]}; "
            "take them out, or set data.window if their values lie outside of it"
        )
    _, number = np.unique(site.hash_contents(torch.from_numpy(rows)), axis=0, return_inverse=True)
    same: defaultdict[int, list[int]] = defaultdict(list)
    for place, content in enumerate(number.reshape(-1).tolist()):
        same[content].append(place)
    twice = [places for places in same.values() if len(places) > 1 and places[0] not in empty]
    for what, of in (("under two classes", y), ("on both sides of a split", part_of.tolist())):
        if differ := [places for places in twice if len({of[place] for place in places}) > 1]:
            first = ", ".join(f"{where[p]} ({classes[y[p]]}, {part_of[p]})" for p in differ[0][:3])
            yield Suspicion(
                f"{site.name}: {len(differ)} images are there more than once, {what}: {first}; "
                "take out all but the right ones"
            )
