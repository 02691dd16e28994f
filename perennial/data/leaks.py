"""Which columns of a table tell the class, alone, by being filled, or two together: what may follow it.

Nothing is decided here: a strong sign of a disease and a record of its outcome look alike. So columns are
ranked, and those that stand out from all others are asked about.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perennial.data.csv_file import CsvFile, normalise_decimals
from perennial.data.table_columns import is_number, mask_missing

LEAST_FILLED = 0.5
"""By so much a column's filled share must differ between two classes at the same site to be asked about."""
LEAST_OF_CLASS = 10
APART = 0.08
"""By so much a column, or a pair, must tell the class better than all others to stand out."""
ALMOST, TOGETHER = 0.9, 0.94
MOST_PAIRED = 40
_OUTCOMES = re.compile(
    r"death|died|dead|deceased|expired|mortality|survival|survived|discharge[d]?|slos|los|dtime|futime|"
    r"hospdead|lengthofstay|followup(time|days)?|(time|days)todeath|verstorben|tod|todesdatum|sterbedatum|"
    r"entlassung(sdatum|sart)?|liegedauer|verweildauer"
)


@dataclass(frozen=True)
class Told:
    """What one column tells of the class. auroc: the largest of each class against the rest, folded.

    filled: class -> share of its rows in which the column holds something.
    """

    name: str
    auroc: float
    filled: dict[str, float]

    def __str__(self) -> str:
        shares = {name: f"{100 * share:.0f} %" for name, share in self.filled.items()}
        alike = len(set(shares.values())) == 1
        filled = "" if alike else f"; filled for {', '.join(f'{n} {s}' for n, s in [*shares.items()][:4])}"
        return f"{self.name} {self.auroc:.3f}{filled}"


def rank_columns(
    file: CsvFile, label: str, columns: Mapping[str, Any], missing: Sequence[str] = ()
) -> list[Told]:
    """Every feature column by how well it alone tells the class, the best first."""
    present = np.flatnonzero(~mask_missing(file.columns[label], missing))
    names, y = np.unique(file.columns[label][present], return_inverse=True)
    found = []
    for name in columns:
        texts = file.columns[name][present]
        here = ~mask_missing(texts, missing)
        filled = {str(each): float(here[y == place].mean()) for place, each in enumerate(names.tolist())}
        values = _score_rows(texts, here, y, file)
        scores = [_compute_auroc(values, y == place) for place in range(len(names))] or [0.5]
        found.append(Told(name, max(max(score, 1 - score) for score in scores), filled))
    return sorted(found, key=lambda told: -told.auroc)


def is_outcome(name: str) -> bool:
    """Whether a column has the name of something that is known after the disease took its course."""
    words = [word.lower() for word in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", name) if word]
    return _OUTCOMES.fullmatch("".join(words)) is not None or any(map(_OUTCOMES.fullmatch, words))


def find_filled_class(
    texts: np.ndarray, y: np.ndarray, here: np.ndarray, sites: np.ndarray | None
) -> tuple[int, int] | None:
    """(class for which the column is filled, class for which it is empty), or None.

    Classes are compared at one site at a time: a hospital that measures less and treats other patients makes
    the two differ over all sites.
    """
    apart: dict[tuple[int, int], list[float]] = {}
    for site in [None] if sites is None else np.unique(sites).tolist():
        rows = np.ones(len(y), dtype=bool) if site is None else sites == site
        labels = [
            place for place in np.unique(y[rows]).tolist() if (y[rows] == place).sum() >= LEAST_OF_CLASS
        ]
        for one, other in combinations(labels, 2):
            difference = here[rows & (y == one)].mean() - here[rows & (y == other)].mean()
            apart.setdefault((one, other), []).append(float(difference))
    means = {pair: float(np.mean(values)) for pair, values in apart.items()}
    if not means:
        return None
    pair = max(means, key=lambda each: abs(means[each]))
    if abs(means[pair]) < LEAST_FILLED:
        return None
    return pair if means[pair] > 0 else (pair[1], pair[0])


def find_telling_pairs(
    file: CsvFile, names: Sequence[str], rows: np.ndarray, y: np.ndarray, missing: Sequence[str]
) -> Iterator[tuple[str, str, float]]:
    """Yield two columns that tell the class together and neither alone: (one, other, mean share of a class).

    Each pair is judged by a linear head of both values and their product, fitted to the first half of `rows`.
    """
    columns = {}
    for name in names[:MOST_PAIRED]:
        texts = file.columns[name][rows]
        here = ~mask_missing(texts, missing)
        values = _score_rows(texts, here, y, file)
        known = values[~np.isnan(values)]
        spread = float(known.std()) if len(known) and np.isfinite(known).all() else 0.0
        if 0 < spread < np.inf:
            columns[name] = np.nan_to_num((values - known.mean()) / spread)
    alone = {name: _share(np.stack([x, x * x], axis=1), y) for name, x in columns.items()}
    shares = {
        (one, other): _share(np.stack([a, b, a * b, a * a, b * b], axis=1), y)
        for (one, a), (other, b) in combinations(columns.items(), 2)
    }
    for pair, share in sorted(shares.items(), key=lambda each: -each[1])[:3]:
        others = [value for other, value in shares.items() if not set(pair) & set(other)]
        rest = max([*others, *(alone.values())], default=0.0)
        if share >= TOGETHER and share >= rest + APART:
            yield *pair, share


def _score_rows(texts: np.ndarray, here: np.ndarray, y: np.ndarray, file: CsvFile) -> np.ndarray:
    """(N,) numbers that order the rows: the column's own, or how often its text goes with a class."""
    found, place = np.unique(texts, return_inverse=True)
    points = normalise_decimals(found, file.decimal).tolist()
    numbers = np.array([float(text) if is_number(text) else np.nan for text in points])[place]
    numbers[~here] = np.nan
    if not here.any() or np.isfinite(numbers[here]).mean() > 0.5:
        return numbers
    rarest = int(np.bincount(y).argmin()) if len(y) else 0
    values = np.full(len(y), np.nan)
    even = np.arange(len(y)) % 2 == 0
    for half in (even, ~even):
        learnt = here & ~half
        total = np.bincount(place[learnt], minlength=len(found))
        ill = np.bincount(place[learnt & (y == rarest)], minlength=len(found))
        share = float((y[learnt] == rarest).mean()) if learnt.any() else 0.0
        values[here & half] = ((ill + 2 * share) / (total + 2))[place[here & half]]
    return values


def _compute_auroc(values: np.ndarray, positive: np.ndarray) -> float:
    """Area under the curve of the rows that have a value; .5 where one side has none."""
    known = np.isfinite(values)
    values, positive = values[known], positive[known]
    ill, well = int(positive.sum()), int((~positive).sum())
    if not ill or not well:
        return 0.5
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - ill * (ill + 1) / 2) / (ill * well))


def _share(x: np.ndarray, y: np.ndarray) -> float:
    """Mean over classes of the share of the second half that a head of the first half tells rightly."""
    half = len(y) // 2
    x = np.column_stack([x, np.ones(len(x))])
    targets = np.eye(int(y.max()) + 1)[y]
    weight = 1 / np.maximum(np.bincount(y[:half], minlength=targets.shape[1]), 1)[y[:half]]
    left = x[:half] * weight[:, None]
    products = left.T @ x[:half] + 1e-6 * np.eye(x.shape[1])
    told = (x[half:] @ np.linalg.solve(products, left.T @ targets[:half])).argmax(axis=1)
    return float(np.mean([(told[y[half:] == label] == label).mean() for label in np.unique(y[half:])]))


def score_column(texts: np.ndarray, y: np.ndarray, empty: np.ndarray, file: CsvFile) -> float:
    """Mean over classes of the share of the second half's rows that the first half's column tells."""
    found, value = np.unique(texts, return_inverse=True)
    points = normalise_decimals(found, file.decimal).tolist()
    numbers = np.array([float(text) if is_number(text) else np.nan for text in points])[value]
    half = len(y) // 2
    told = np.full(len(y) - half, np.bincount(y[:half]).argmax())
    as_number = ~empty & np.isfinite(numbers)
    for numeric, group, key in ((True, as_number, numbers), (False, ~as_number, value.astype(float))):
        learnt, asked = np.flatnonzero(group[:half]), np.flatnonzero(group[half:])
        if not len(learnt) or not len(asked):
            continue
        order = learnt[np.argsort(key[learnt], kind="stable")]
        right = np.searchsorted(key[order], key[half + asked]).clip(0, len(order) - 1)
        left = (right - 1).clip(0)
        near = np.abs(key[order[left]] - key[half + asked]) < np.abs(key[order[right]] - key[half + asked])
        nearest = order[np.where(near, left, right)]
        exact = key[nearest] == key[half + asked]
        most = _find_most_frequent(key[:half][learnt], y[:half][learnt])
        answers = np.array([most[float(value)] for value in key[nearest]])
        # a number lies between others; a text that was never met tells nothing
        known = exact | numeric
        told[asked[known]] = answers[known]
    judged = y[half:]
    return float(np.mean([(told[judged == label] == label).mean() for label in np.unique(judged)]))


def _find_most_frequent(keys: np.ndarray, y: np.ndarray) -> dict[float, int]:
    found: defaultdict[float, Counter[int]] = defaultdict(Counter)
    for key, label in zip(keys.tolist(), y.tolist(), strict=True):
        found[key][label] += 1
    return {key: counted.most_common(1)[0][0] for key, counted in found.items()}
