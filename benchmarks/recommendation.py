"""What a hospital gains, in README.md; which method suits whom and which rule withstands what, in docs/.

`python -m benchmarks.recommendation` writes the figures between the pages' marks again, and the
blocks on methods to benchmarks/results/recommendation.md.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.controls import CHANCE, COMPARED, RAW_MEAN, Measured, controls_of, stands_for
from benchmarks.grid import newest
from benchmarks.intervals import half_width, t_interval
from benchmarks.markdown import age, listed
from benchmarks.marked_blocks import with_blocks
from benchmarks.robust_advice import robust
from benchmarks.table import RESULTS, ROOT, Table, table_called
from benchmarks.tables.advice_tried import AUTO, CLOSED_FORM, ROUNDS, SETS
from benchmarks.tables.hospital_gains import FEDERATED, PLACES, POOLED, PROTECTED, Place

README = ROOT / "README.md"
WHICH = ROOT / "docs" / "which_method.md"
THREATS = ROOT / "docs" / "threat_model.md"
GAINS = "hospital_gains"
BALANCED, PLAIN = "final balanced accuracy", "final accuracy"
Runs = Sequence[Mapping[str, Any]]


def runs_of(table: str) -> Runs:
    """The committed runs of a table."""
    return newest(table_called(table), RESULTS / f"{table}.jsonl")


def _by_seed(runs: Runs, row: str, measure: str) -> dict[int, float]:
    return {run["seed"]: 100 * run["measures"][measure] for run in runs if run["row"] == row}


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "not run"
    spread = f" ± {half_width(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def gains() -> str:
    """One line for each place and measure."""
    runs, controls = runs_of(GAINS), controls_of(table_called(GAINS))
    heads = (
        *("data", "each alone", "best alone", "together", "together, epsilon 8", "all data in one place"),
        RAW_MEAN,
    )
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for measure in (BALANCED, PLAIN):
        for place in PLACES:
            simple = _controls(place, measure, controls)
            cells = (f"{place.name}, {measure.removeprefix('final ')}", *_cells(place, measure, runs, simple))
            lines.append(f"| {' | '.join(cells)} |")
    seeds = listed(sorted({run["seed"] for run in runs}))
    about = (
        f"Per cent, mean of seeds {seeds} and half its 95 %\n"
        "t-interval, on the test records of all sites. Each alone: the mean over sites that learn by\n"
        "themselves; best alone: the site with the highest mean. These columns are closed form\n"
        "(`strategy: analytic`), one exchange a task. Epsilon 8, delta 0.00001, hides one training record\n"
        "from the server together with any one other site; its head knows the noise. Chance:\n"
        "not above an answer that is always the commonest class. "
        f"{RAW_MEAN.capitalize()}: the simplest\nclassifier, all data in one place."
    )
    return "\n".join([*lines, "", about]) + "\n"


BySeed = Mapping[int, float]


def _controls(place: Place, measure: str, controls: Measured) -> tuple[BySeed, BySeed]:
    """Seed -> per cent of the commonest class, and of the nearest mean of raw inputs, on a place's data."""
    found = controls[stands_for(table_called(GAINS))[f"{place.name}: {FEDERATED}"]]
    name = COMPARED[measure]
    chance, raw = (
        {seed: 100 * shares[name] for seed, shares in found[label].items()} for label in (CHANCE, RAW_MEAN)
    )
    return chance, raw


def _cells(place: Place, measure: str, runs: Runs, simple: tuple[BySeed, BySeed]) -> list[str]:
    chance, raw = simple

    def values(label: str) -> dict[int, float]:
        return _by_seed(runs, f"{place.name}: {label}", measure)

    alone = [values(f"{site} alone") for site in place.sites]
    seeds = sorted(set.intersection(*(set(each) for each in alone)))
    mean = [statistics.mean(each[seed] for each in alone) for seed in seeds]
    best = max(alone, key=lambda each: statistics.mean(each.values()) if each else 0.0)
    together = [values(label) for label in (FEDERATED, PROTECTED, POOLED)]
    columns = [dict(zip(seeds, mean, strict=True)), best, *together]
    cells = [f"{_cell(list(found.values()))}{_by_chance(found, chance)}" for found in columns]
    return [*cells, _cell(list(raw.values()))]


def _by_chance(found: BySeed, chance: BySeed) -> str:
    """' (chance)' where the 95 % t-interval of the paired difference is not above 0."""
    differences = [found[seed] - chance[seed] for seed in found if seed in chance]
    return " (chance)" if len(differences) > 1 and t_interval(differences).low <= 0 else ""


@dataclass(frozen=True)
class Advice:
    """Who should use what, and the rows that say so: (what they are called here, table, row, measure).

    trust: what others see of a site.
    """

    situation: str
    use: str
    trust: str
    evidence: Sequence[tuple[str, str, str, str]]

    def line(self, read: Callable[[str], Runs] = runs_of) -> str:
        figures = "; ".join(
            f"{label} {_cell(list(_by_seed(read(table), row, measure).values()))}"
            f" ({_cost(table_called(table), row, read(table))})"
            for label, table, row, measure in self.evidence
        )
        return f"| {self.situation} | {self.use} | {figures} | {self.trust} |"


def _cost(table: Table, label: str, runs: Runs) -> str:
    """Exchanges with each site, and seconds of one core for all sites together: the fastest run's."""
    row = next(row for row in table.rows if row.label == label)
    tasks = row.load(table.seeds[0]).tasks
    count = tasks.count or (len(tasks.increments) if isinstance(tasks.increments, tuple) else 1)
    rounds = sum(tasks.rounds) if isinstance(tasks.rounds, tuple) else tasks.rounds * count
    seconds = [run["seconds"] for run in runs if run["row"] == label]
    return f"{rounds} rounds" + (f", {min(seconds):.0f} s" if seconds else "")


LAST_NINE = "mean of the last 9 rounds"
ADVICE = (
    Advice(
        "you begin, or data are few, or nobody can supervise rounds",
        "`strategy: analytic` ([page](methods/analytic.md); "
        "[when sites lie](methods/analytic.md#when-sites-lie-or-differ))",
        "the server: each site's sums; with `secure` their total alone, with noise an epsilon",
        (
            ("digits in five tasks: closed form", "analytic_digits", "ridge on 1,500 random features", PLAIN),
            ("PP-FCIL at the same protocol", "analytic_digits", "PP-FCIL", PLAIN),
        ),
    ),
    Advice(
        "the same, tried on two sets of data that no table and no choice had used",
        "`strategy: analytic`",
        "as above",
        tuple(
            (f"{name}: {label}", "advice_tried", f"{name}: {label}", PLAIN)
            for name in SETS
            for label in (CLOSED_FORM, AUTO, ROUNDS)
        ),
    ),
    Advice(
        "new classes arrive and a network must learn its own features",
        "PP-FCIL ([page](methods/pp_fcil.md)), or plain replay with a balanced softmax",
        "the server: each site's updates, and what PP-FCIL's weights ask; no epsilon",
        (
            (
                "digits in five tasks: replay, balanced softmax",
                "learners_digits",
                "quickstart: replay, balanced softmax, distillation, contrastive term",
                PLAIN,
            ),
            ("fine-tuning", "learners_digits", "fine-tuning", PLAIN),
        ),
    ),
    Advice(
        "sites leave for good, and what they knew must stay",
        "FedDig ([page](methods/feddig.md)), if the sites lend digests",
        "the server: updates, and mixtures of a few samples' features",
        (
            (
                "digits, all four sites leave: FedDig",
                "feddig_digits",
                "FedDig, mixing within classes, spread, 4 server epochs",
                LAST_NINE,
            ),
            ("FedAvg", "feddig_digits", "FedAvg, with FedDig's network", LAST_NINE),
        ),
    ),
    Advice(
        "groups of sites differ from one another",
        "fine-tuning of the global model; FedPerC ([page](methods/fedperc.md)) if the groups are known",
        "the server: updates, and who is like whom",
        (
            ("16 sites in 4 groups: fine-tuning", "fedperc_synth", "fine-tuning, equal budget", "own models"),
            ("FedPerC with known groups", "fedperc_synth", "FedPerC, true groups", "own models"),
            ("FedPerC that looks for them", "fedperc_synth", "FedPerC", "own models"),
        ),
    ),
    Advice(
        "few exchanges, little data at each site, order of visits does not matter",
        "TriCon-SF's ring ([page](methods/tricon_sf.md)), or averaging with more local epochs",
        "the server, and in a ring the next site too: each site's model",
        (
            ("digits, 10 sites, 10 rounds: ring", "tricon_sf_digits", "ring, new order each sweep", PLAIN),
            (
                "averaging at equal work",
                "tricon_sf_digits",
                "FedAvg, equal work: 10 local epochs",
                PLAIN,
            ),
        ),
    ),
)


def advice() -> str:
    """The table of advice; a figure of an old revision says so below it."""
    tables = sorted({table for each in ADVICE for _, table, _, _ in each.evidence})
    old = [f"`{table}`" for table in tables if age(runs_of(table))]
    lines = [
        "| if | use | because, per cent (rounds; seconds of one core for all sites) | who sees what |",
        "| --- " * 4 + "|",
        *(each.line() for each in ADVICE),
    ]
    if old:
        lines += [
            "",
            f"**Figures here are old** where they are of {', '.join(old)}; they will be made again.",
        ]
    return "\n".join(lines) + "\n"


def rendered(path: Path) -> str:
    """One of the three pages with the figures of today's results."""
    if path == THREATS:
        return with_blocks(path.read_text(), {"robust": robust(runs_of)})
    blocks = {"gains": gains()} if path == README else {"advice": advice()}
    return with_blocks(path.read_text(), blocks)


if __name__ == "__main__":
    (RESULTS / "recommendation.md").write_text(f"{gains()}\n{advice()}")
    for path in (README, WHICH, THREATS):
        path.write_text(rendered(path))
        print(path)
