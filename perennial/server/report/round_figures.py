"""The charts of a report over rounds: learning, participation, traffic and time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from perennial.server.charts.bars import Columns
from perennial.server.charts.cells import MOST_ROWS, State, States
from perennial.server.charts.curves import Curve, Curves, Span
from perennial.server.charts.frame import Axis
from perennial.server.report.markup import (
    Markup,
    Picture,
    decimal,
    duration,
    folded,
    label,
    percent,
    plural,
    size,
    size_unit,
    table,
)
from perennial.server.report.task_figures import SHARES
from perennial.server.run_record import RoundEvent, Run

PARTICIPATION = (
    State("not asked", "idle"),
    State("took part", "joined"),
    State("absent", "away"),
    State("refused", "under"),
    State("reply dropped", "dropped"),
)
"""By how much each matters: a column that stands for several rounds shows the last of them."""
JOINED, ABSENT, REFUSED, DROPPED = 1, 2, 3, 4


def _tasks(rounds: Sequence[RoundEvent]) -> list[Span]:
    """Every other task is shaded, and each is named over the plot."""
    spans: dict[int, list[int]] = {}
    for event in rounds:
        spans.setdefault(event.task, []).append(event.round)
    words = ("task {}" if len(spans) <= 6 else "{}") if len(spans) <= 20 else ""
    return [
        Span(min(numbers) - 0.5, max(numbers) + 0.5, words.format(task), index % 2 == 0)
        for index, (task, numbers) in enumerate(spans.items())
    ]


def _by_round(
    run: Run, name: str, values: Sequence[float | None], words: Callable[[float | None], str], up: Axis
) -> Curves:
    rounds = run.rounds
    curve = Curve(
        name,
        [(event.round, value) for event, value in zip(rounds, values, strict=True)],
        [f"round {event.round}: {words(value)}" for event, value in zip(rounds, values, strict=True)],
        dots=len(values) <= 60,
        bridged=True,
    )
    first, last = rounds[0].round - 0.5, rounds[-1].round + 0.5
    across = Axis("round", first, last, "{:.0f}".format, whole=True, grid=False)
    return Curves([curve], across, up, 300, _tasks(rounds))


def accuracy_by_round(run: Run) -> Picture:
    """Accuracy on all classes so far, at the rounds where it was measured."""
    chart = _by_round(run, "accuracy", [event.accuracy for event in run.rounds], percent, SHARES)
    return Picture(
        "accuracy-by-round",
        "Accuracy in each round",
        "On all classes so far. It drops where a task brings new classes and recovers as they are learned.",
        chart,
        wide=True,
    )


def train_loss(run: Run) -> Picture:
    """Mean training loss of the sites in each round."""
    values = [event.train_loss for event in run.rounds]
    chart = _by_round(run, "training loss", values, lambda value: decimal(value, 4), Axis(low=0.0))
    description = "Mean over the sites that took part; new classes raise it at the start of a task."
    return Picture("train-loss", "Training loss in each round", description, chart, wide=True)


def participation(run: Run, sites: Sequence[str]) -> Picture:
    """A grid of sites and rounds: who took part, and what became of the others."""
    position = {site: row for row, site in enumerate(sites)}
    codes = [[0] * len(run.rounds) for _ in sites]
    notes: dict[tuple[int, int], str] = {}
    for column, event in enumerate(run.rounds):
        for site in event.participants:
            codes[position[site]][column] = JOINED
        for site in event.absent:
            codes[position[site]][column] = ABSENT
        for code, entries in ((REFUSED, event.refused), (DROPPED, event.dropped)):
            for entry in entries:
                codes[position[entry.site]][column] = code
                notes[position[entry.site], column] = f": {label(entry.reason, 80)}"
    rounds = [event.round for event in run.rounds]
    chart = States(sites, rounds, codes, PARTICIPATION, notes, "round")
    description = "One row for each site, one column for each round."
    if len(sites) > MOST_ROWS:
        chart = _most_troubled(chart)
        description += f" The {MOST_ROWS} sites that were away, refused or were dropped most often."
    return Picture("participation", "Participation", description, chart, wide=True)


def _most_troubled(chart: States) -> States:
    """The rows in which most is amiss, in their order."""
    amiss = [sum(code > JOINED for code in row) for row in chart.codes]
    kept = sorted(sorted(range(len(amiss)), key=lambda row: -amiss[row])[:MOST_ROWS])
    new = {row: index for index, row in enumerate(kept)}
    return replace(
        chart,
        rows=[chart.rows[row] for row in kept],
        codes=[chart.codes[row] for row in kept],
        notes={(new[row], column): note for (row, column), note in chart.notes.items() if row in new},
    )


def traffic(run: Run) -> Picture:
    """Bytes from and to the sites in each round; the text has those of the ends of tasks too."""
    largest = max(max(event.bytes_up, event.bytes_down) for event in run.rounds)
    unit, factor = size_unit(largest)
    series = [
        ("from the sites", 0, [event.bytes_up / factor for event in run.rounds]),
        ("to the sites", 5, [event.bytes_down / factor for event in run.rounds]),
    ]
    summary = run.summary
    description = (
        f"In the rounds, {size(summary.bytes_up)} from the sites and {size(summary.bytes_down)} to them"
    )
    if summary.task_end_bytes_up is not None and summary.task_end_bytes_down is not None:
        up, down = size(summary.task_end_bytes_up), size(summary.task_end_bytes_down)
        description += f"; at the ends of tasks, {up} and {down} more"
    description += ". Model and method tensors alone, without what carries them."
    chart = _columns(run, series, unit, lambda count: f"{count:.4g} {unit}")
    return Picture("traffic", "Traffic in each round", description, chart)


def time_by_round(run: Run) -> Picture:
    """Seconds of each round."""
    known = sorted(event.seconds for event in run.rounds if event.seconds is not None)
    median = f"Half of the rounds took under {duration(known[len(known) // 2])}. " if known else ""
    description = f"{median}The whole run took {duration(run.summary.seconds)}."
    series = [("", 0, [event.seconds for event in run.rounds])]
    chart = _columns(run, series, "seconds", lambda seconds: f"{seconds:.3g} s")
    return Picture("time", "Time in each round", description, chart)


def _columns(
    run: Run,
    series: Sequence[tuple[str, int, Sequence[float | None]]],
    title: str,
    words: Callable[[float], str],
) -> Columns:
    rounds = [event.round for event in run.rounds]
    return Columns(rounds, series, Axis(title, low=0.0), words, "round", 320, _tasks(run.rounds))


def rounds_table(run: Run) -> Markup:
    """The numbers behind every chart over rounds."""
    rows = [
        [
            event.round,
            event.task,
            len(event.participants),
            "skipped" if event.skipped else "",
            decimal(event.train_loss, 4),
            percent(event.accuracy),
            size(event.bytes_up),
            size(event.bytes_down),
            decimal(event.seconds),
        ]
        for event in run.rounds
    ]
    columns = ["round", "task", "sites", "", "training loss", "accuracy", "up", "down", "seconds"]
    numbers = table(columns, rows, "lrrlrrrrr", "Rounds")
    return folded(f"All {plural(len(rows), 'round')} in numbers", numbers, len(rows))
