"""Compares several runs: means over seeds, and differences seed by seed.

A row is an experiment: runs of one name, the same data and settings but the seed. Deviations are those of a
sample (divided by n - 1); with one seed there is none. A claim "A > B" rests on the seeds that both have: on
how many of them A wins, and by how much in the mean. That is no significance test, and none is given. "A = B"
says that the mean difference is zero; the wins are A's.

A claim needs runs that were measured on the same samples and classes (`measured_on` of the summary; where a
run has none, the settings that say how its data are read). Of other pairs the comparison says why it makes
no claim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from perennial.config.document import flatten_settings
from perennial.config.schema import ON_DISK
from perennial.foundation.errors import StateError
from perennial.server.report.markup import MISSING, format_points
from perennial.server.run_record import Run, Summary, read_run

MEASURES: Mapping[str, Callable[[Summary], float | None]] = {
    "final balanced accuracy": lambda summary: summary.final_balanced,
    "final accuracy": lambda summary: summary.final_accuracy,
    "average incremental accuracy": lambda summary: summary.average_incremental_accuracy,
    "forgetting": lambda summary: summary.forgetting,
    "backward transfer": lambda summary: summary.backward_transfer,
}
BALANCED = "final balanced accuracy"
FINAL = (BALANCED, "final accuracy")
OVER_TASKS = ("average incremental accuracy",)
"""Measures of which the pages say who is better."""
NOTE = "± is the standard deviation over seeds."
EQUAL = 1e-9
"""Mean differences up to this are a float's error: shares of whole samples cannot come so near."""


@dataclass(frozen=True)
class Spread:
    """Mean over seeds and standard deviation; deviation is None for fewer than two seeds.

    Both are None where a seed was not measured.
    """

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread":
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(None, None)
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)

    def __str__(self) -> str:
        """In percent: '81.4 ± 1.2', '81.4' or a dash."""
        if self.mean is None:
            return MISSING
        deviation = "" if self.deviation is None else f" ± {100 * self.deviation:.1f}"
        return f"{100 * self.mean:z.1f}{deviation}".replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Row:
    """One experiment, run with several seeds. runs: by seed."""

    experiment: str
    runs: Mapping[int, Run]

    def spread(self, measure: str) -> Spread:
        return Spread.of([MEASURES[measure](run.summary) for run in self.runs.values()])

    @cached_property
    def settings(self) -> dict[str, str]:
        """Settings of the first run's experiment, by dotted key."""
        return _flatten_settings(next(iter(self.runs.values())))


@dataclass(frozen=True)
class Difference:
    """A paired difference of two rows over the seeds that both have: better > worse.

    better = worse if the mean difference is 0. wins: on how many seeds the better row is ahead.
    """

    better: str
    worse: str
    measure: str
    mean: float
    wins: int
    seeds: int

    @property
    def claim(self) -> str:
        return f"{self.better} {'>' if self.mean else '='} {self.worse}"


@dataclass(frozen=True)
class Comparison:
    """Rows, best final figure first, and their paired differences; as text, tables in Markdown."""

    rows: Sequence[Row]
    differences: Sequence[Difference]
    unlike: Sequence[tuple[str, str, str]] = ()
    """Pairs of rows of which nothing is claimed, with the reason."""

    def list_reasons(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows of the pairs that are not compared."""
        return ["experiment", "and", "not compared, because"], [list(pair) for pair in self.unlike]

    @property
    def measures(self) -> list[str]:
        """Names of the table's measures, balanced accuracy first, and only if class sizes differ much."""
        return choose_measures(self.rows)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows of the table; shares in percent, differences of shares in points."""
        columns = ["experiment", "seeds", *self.measures]
        rows = [
            [row.experiment, str(len(row.runs)), *(str(row.spread(measure)) for measure in self.measures)]
            for row in self.rows
        ]
        return columns, rows

    def list_claims(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows of the paired differences.

        A row: the claim (better > worse, or = if the mean is 0), the measure, on how many seeds the better
        one is ahead, and the mean difference in points.
        """
        columns = ["claim", "measure", "wins", "mean difference (points)"]
        rows = [
            [d.claim, d.measure, f"{d.wins} of {d.seeds}", format_points(d.mean)] for d in self.differences
        ]
        return columns, rows

    def __str__(self) -> str:
        tables = [build_markdown_table(*self.cells(), "lr" + "r" * len(self.measures))]
        if "±" in tables[0]:
            tables.append(NOTE)
        if self.differences:
            tables.append(build_markdown_table(*self.list_claims(), "llrr"))
        if self.unlike:
            tables.append(build_markdown_table(*self.list_reasons(), "lll"))
        return "\n\n".join(tables)


def compare(run_folders: Sequence[Path]) -> Comparison:
    """Compare finished runs.

    Raises StateError when there are no runs, one is missing or damaged, or two are alike in experiment,
    settings and seed.
    """
    rows = _build_rows([read_run(folder) for folder in run_folders])
    differences, unlike = [], []
    for first, second in combinations(rows, 2):
        if reason := explain_unlike_data(first, second):
            unlike.append((first.experiment, second.experiment, reason))
            continue
        found = [_compute_difference(first, second, measure) for measure in _select_claimed(first, second)]
        differences += [difference for difference in found if difference is not None]
    return Comparison(rows, differences, unlike)


OF_THE_DIVISION = (
    "data.path",
    "data.partition",
    "data.sites",
    "data.samples_limit",
    "data.validation_fraction",
)
"""Keys of `data` that do not say which samples a model is measured on; a path differs between machines."""


def explain_unlike_data(first: Row, second: Row) -> str:
    """In words, why the figures of two rows cannot be compared; '' if they can."""
    one, other = ({frozenset(run.summary.classes) for run in row.runs.values()} for row in (first, second))
    if one != other:
        return "their models know different classes"
    for seed in first.runs.keys() & second.runs.keys():
        known = [row.runs[seed].summary.measured_on for row in (first, second)]
        if None not in known:
            if known[0] != known[1]:
                return "they were measured on different samples"
            continue
        keys = dict.fromkeys(k for row in (first, second) for k in row.settings if k.startswith("data."))
        for key in keys:
            if not key.startswith(OF_THE_DIVISION) and first.settings.get(key) != second.settings.get(key):
                return f"their data are read differently ({key})"
    return ""


def _select_claimed(first: Row, second: Row) -> Sequence[str]:
    """Measures of which two rows allow a claim: a mean over tasks needs the same classes in each task."""
    finals = [measure for measure in choose_measures([first, second]) if measure in FINAL]
    alike = all(
        _list_tasks(first.runs[seed]) == _list_tasks(second.runs[seed])
        for seed in first.runs.keys() & second.runs.keys()
    )
    return [*finals, *OVER_TASKS] if alike else finals


def _list_tasks(run: Run) -> tuple[int, list[set[str]]]:
    """The number of tasks that were measured, and the classes of each."""
    return len(run.summary.accuracy_matrix), [{*task} for task in run.summary.tasks]


def _build_rows(runs: Sequence[Run]) -> list[Row]:
    if not runs:
        raise StateError("nothing to compare: name at least one run folder")
    names: dict[str, list[Run]] = {}
    for run in runs:
        names.setdefault(run.summary.experiment, []).append(run)
    rows: list[Row] = []
    for name, namesakes in names.items():
        for settings, group in _group_by_settings(namesakes).items():
            by_seed: dict[int, Run] = {}
            title = f"{name} ({settings})" if settings else name
            for run in group:
                if twin := by_seed.get(run.summary.seed):
                    same = "model_sha256", "final_accuracy", "accuracy_matrix"
                    if all(getattr(twin.summary, key) == getattr(run.summary, key) for key in same):
                        continue  # the run was made again, and came to the same
                    raise StateError(
                        f"{run.folder}: experiment {title!r} with seed {run.summary.seed} is also in "
                        f"{twin.folder}; compare one of them, or a run with another seed"
                    )
                by_seed[run.summary.seed] = run
            rows.append(Row(title, dict(sorted(by_seed.items()))))
    first = choose_measures(rows)[0]

    def place(row: Row) -> tuple[bool, float]:
        """Best first, those without a measurement last."""
        mean = row.spread(first).mean
        return mean is None, -(mean or 0.0)

    return sorted(rows, key=place)


def choose_measures(rows: Sequence[Row]) -> list[str]:
    """Names of the measures to compare, the one to report first; balanced accuracy only if unbalanced."""
    unbalanced = any(run.summary.unbalanced for row in rows for run in row.runs.values())
    return [measure for measure in MEASURES if measure != BALANCED or unbalanced]


def _group_by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one name by the settings in which they differ ('learner.epochs=2'); '' where they agree.

    Neither a seed nor where a file lies on a disk makes another experiment; what the file holds does.
    """
    settings = [
        _flatten_settings(run)
        | {
            "classes": " ".join(sorted(run.summary.classes)),
            "data_sha256": (run.summary.data_sha256 or "unknown")[:12],
        }
        for run in runs
    ]
    keys = dict.fromkeys(
        key for one in settings for key in one if key not in {"seed", *_flatten_keys(ON_DISK)}
    )
    differing = [key for key in keys if len({one.get(key) for one in settings}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, one in zip(runs, settings, strict=True):
        groups.setdefault(", ".join(f"{key}={one.get(key)}" for key in differing), []).append(run)
    return groups


def _flatten_settings(run: Run) -> dict[str, str]:
    """The settings of a run's experiment by dotted key, as text."""
    path = run.folder / "experiment.yaml"
    try:
        content = yaml.safe_load(run.experiment_text)
    except yaml.YAMLError as error:
        raise StateError(f"{path}: not valid YAML ({error}); resume the run to write it again") from None
    if not isinstance(content, dict):
        raise StateError(
            f"{path}: found {type(content).__name__}, expected a mapping; resume the run to write it"
        )
    return {key: str(value) for key, value in flatten_settings(content).items()}


def _flatten_keys(keys: Any) -> set[str]:
    """Keys as pydantic takes them to leave them out, {"data": {"path"}}, as {"data.path"}."""
    if isinstance(keys, set):
        return keys
    return {f"{name}.{key}" for name, inner in keys.items() for key in _flatten_keys(inner)}


def _compute_difference(first: Row, second: Row, measure: str) -> Difference | None:
    value = MEASURES[measure]
    gaps = []
    for seed in first.runs.keys() & second.runs.keys():
        one, other = value(first.runs[seed].summary), value(second.runs[seed].summary)
        if one is not None and other is not None:
            gaps.append(one - other)
    if not gaps:
        return None
    better, worse, mean = first.experiment, second.experiment, fmean(gaps)
    if abs(mean) <= EQUAL:
        mean = 0.0
    elif mean < 0:
        better, worse, mean, gaps = worse, better, -mean, [-gap for gap in gaps]
    return Difference(better, worse, measure, mean, sum(gap > 0 for gap in gaps), len(gaps))


def build_markdown_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: str,
    format_name: Callable[[str], str] | None = None,
) -> str:
    """A table in Markdown. align: one letter a column, l or r.

    format_name: makes a row's first cell of text from other institutions; None: as the other cells.
    """
    rules = ["---:" if side == "r" else "---" for side in align]
    named = [[(format_name or _format_cell)(name), *map(_format_cell, rest)] for name, *rest in rows]
    lines = [[*map(_format_cell, columns)], rules, *named]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_cell(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
