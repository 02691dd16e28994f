"""Whom a ring accuses, rightly and wrongly: `python -m perennial.benchmarks.detection_fairness`.

One dishonest site of 8 or 20, by heterogeneity, with one task and with five; digits, and long runs in which
the model is good long before the end, on digits, skin lesions and gene expression. Every sweep is valued. A
cell has the same seeds without attack and with each attack, and at least 300 honest sites. An attack counts
as harmful where it costs the final accuracy more than HARMFUL beside the run of the same seed without it.
Writes results/detection_fairness.jsonl, a line a run, and detection_fairness.md; goes on where it stopped.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from perennial.benchmarks.dishonest import Attack, attacked_run
from perennial.benchmarks.environment import machine, versions
from perennial.benchmarks.two_runs_audit import clopper_pearson
from perennial.config.run import APP_ROOT, RunSettings
from perennial.foundation.files import replace_file
from perennial.strategies.valuation.exclusion import MOST, Measured

RESULT = Path(__file__).with_name("results") / "detection_fairness.jsonl"
PAGE = RESULT.with_suffix(".md")
EXPERIMENTS = APP_ROOT / "experiments"
ATTACKS = (
    "label_flip",
    "one_class_flip",
    "sign_flip",
    "scaling:boost=10",
    "scaling:boost=100",
    "random",
    "inner_product",
    "free_rider",
)
SEEDS = {8: (1, 2, 3, 4, 5), 20: (1, 2), 10: (1, 2, 3, 4), 5: (1, 2, 3, 4, 5, 6, 7, 8, 9)}
"""By number of sites: with 9 runs a seed, 320, 344, 328 and 333 honest sites a cell."""
HARMFUL = 0.02
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cell:
    """A federation. alpha: of the Dirichlet division. data: experiments/tricon_sf_DATA.yaml."""

    sites: int
    alpha: float
    tasks: int
    rounds: int
    data: str = "digits"

    @property
    def overrides(self) -> list[str]:
        return [
            f"data.sites={self.sites}",
            f"data.partition.alpha={self.alpha}",
            "data.partition.min_samples=0",
            f"tasks.count={self.tasks}",
            f"tasks.rounds={self.rounds}",
            "learner.memory={selection: herding, per_class: 10}",
            "evaluation.every=task",
            "strategy.every=1",
        ]

    @property
    def words(self) -> str:
        tasks = f"{self.tasks} task{'s' * (self.tasks > 1)}"
        return f"{self.data}, {self.sites} sites, Dirichlet {self.alpha:g}, {tasks} of {self.rounds} rounds"


CELLS = [
    *(
        Cell(sites, alpha, tasks, rounds)
        for tasks, rounds in ((1, 8), (5, 4))
        for sites in (8, 20)
        for alpha in (1.0, 0.5, 0.3, 0.1)
    ),
    *(Cell(8, alpha, 1, 60) for alpha in (1.0, 0.3, 0.1)),
    Cell(10, 0.5, 1, 30, "ham10000"),
    Cell(5, 0.5, 1, 60, "genes"),
]


def planned() -> Iterator[tuple[Cell, int, str]]:
    """(cell, seed, attack), "" for none, in the order in which they are made."""
    for cell in CELLS:
        for seed in SEEDS[cell.sites]:
            for attack in ("", *ATTACKS):
                yield cell, seed, attack


def one_run(cell: Cell, seed: int, attack: str) -> dict[str, Any]:
    """Final accuracy and the flags of one run."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = json.dumps([*cell.overrides, f"seed={seed}"])
        experiment = str(EXPERIMENTS / f"tricon_sf_{cell.data}.yaml")
        summary = attacked_run(RunSettings(experiment, overrides, runs=folder, device="cpu"), attack)
    found = summary["contribution"]
    return {
        **asdict(cell),
        "seed": seed,
        "attack": attack,
        "final_accuracy": summary["final_accuracy"],
        "flags": {site: entry["flag"] for site, entry in found.items() if entry["flag"]},
        "behind": {site: round(entry["behind"], 4) for site, entry in found.items() if entry["behind"]},
        "rolled_back": summary["valuation"]["rounds_rolled_back"],
        "sweeps": summary["valuation"]["sweeps"],
        "heterogeneity": summary["valuation"]["heterogeneity"],
    }


def dishonest(cell: Cell, attack: str) -> set[str]:
    """The sites that attack: the last ones."""
    count = Attack.parsed(attack).sites if attack else 0
    return {f"site-{number}" for number in range(cell.sites - count, cell.sites)}


def share(hits: int, of: int) -> str:
    """A share in per cent with its interval."""
    if not of:
        return "-"
    low, high = clopper_pearson(hits, of, (1 - CONFIDENCE) / 2)
    return f"{hits} of {of} ({100 * float(low):.1f} to {100 * float(high):.1f} %)"


def wrongly_accused(cell: Cell, runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(honest sites with any flag, honest sites) of the cell's runs."""
    honest = sum(cell.sites - len(dishonest(cell, run["attack"])) for run in runs)
    return sum(len(run["flags"].keys() - dishonest(cell, run["attack"])) for run in runs), honest


def measured(runs: Sequence[dict[str, Any]]) -> Iterator[Measured]:
    """What strategies/valuation/exclusion.py knows of each cell of digits of which every run is there."""
    for cell in CELLS:
        if cell.data != "digits":
            continue
        own = [run for run in runs if cell_of(run) == cell]
        if len(own) == len(SEEDS[cell.sites]) * (1 + len(ATTACKS)):
            wrong, honest = wrongly_accused(cell, own)
            differ = fmean(run["heterogeneity"] for run in own if not run["attack"])
            bound = float(clopper_pearson(wrong, honest, 1 - CONFIDENCE)[1])
            yield Measured(cell.sites, cell.tasks > 1, round(differ, 4), round(bound, 4))


def row(cell: Cell, runs: Sequence[dict[str, Any]]) -> str:
    """The cell's line of the page."""
    clean = {run["seed"]: run["final_accuracy"] for run in runs if not run["attack"]}
    wrong, honest = wrongly_accused(cell, runs)
    found = harmful = 0
    for run in runs:
        bad = dishonest(cell, run["attack"])
        if bad and run["final_accuracy"] < clean[run["seed"]] - HARMFUL:
            harmful += len(bad)
            found += len(run["flags"].keys() & bad)
    accuracy = sum(clean.values()) / max(len(clean), 1)
    known = next(measured(runs), None)
    exclude = "-" if known is None else "allowed" if known.at_most <= MOST else "refused"
    differ = fmean(run["heterogeneity"] for run in runs if not run["attack"])
    most = max(
        part
        for run in runs
        for site, part in {"": 0.0, **run["behind"]}.items()
        if site not in dishonest(cell, run["attack"])
    )
    return (
        f"| {cell.words} | {differ:.2f} | {share(wrong, honest)} | {100 * most:.0f} % | {exclude} | "
        f"{share(found, harmful)} | {100 * accuracy:.1f} |"
    )


def missed(runs: Sequence[dict[str, Any]]) -> str:
    """Harmful attackers that nobody accused, by attack."""
    clean = {key(run)[:-1]: run["final_accuracy"] for run in runs if not run["attack"]}
    lines = []
    for attack in ATTACKS:
        of = [r for r in runs if r["attack"] == attack]
        harmful = [r for r in of if r["final_accuracy"] < clean[key(r)[:-1]] - HARMFUL]
        hits = sum(bool(r["flags"].keys() & dishonest(cell_of(r), attack)) for r in harmful)
        every = sum(bool(r["flags"].keys() & dishonest(cell_of(r), attack)) for r in of)
        lines.append(f"| {attack} | {share(hits, len(harmful))} | {every} of {len(of)} |")
    return "\n".join(lines)


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return cell_of(run), run["seed"], run["attack"]


def cell_of(run: dict[str, Any]) -> Cell:
    return Cell(run["sites"], run["alpha"], run["tasks"], run["rounds"], run["data"])


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The committed page of all runs that there are."""
    rows = [
        row(cell, [run for run in runs if cell_of(run) == cell])
        for cell in CELLS
        if any(cell_of(run) == cell for run in runs)
    ]
    return "\n".join(
        [
            "# Whom a ring accuses, rightly and wrongly",
            "",
            f"`python -m perennial.benchmarks.detection_fairness`, {len(runs)} of {len(list(planned()))} "
            f"runs; intervals are exact at {CONFIDENCE:.0%}.",
            "",
            "`contribution` around a ring of 4 segments (digits) or 2; every sweep is valued, one site lies. "
            "Wrongly accused: honest sites with any flag, over the runs without attack and with each. Most "
            "turns behind: of the honest site with the largest share of turns that counted against it; the "
            "promise of `false_alarm` holds for sites below 50 %. Harmful: attackers that cost the final "
            f"accuracy more than {100 * HARMFUL:.0f} points beside the same seed without attack. "
            "Heterogeneity: as `strategies/valuation/exclusion.py` computes it from the sites' label counts, "
            "the mean over the runs without attack. `on_flag: exclude` is allowed where, on digits, the "
            f"one-sided {CONFIDENCE:.0%} bound on the share wrongly accused is at most {MOST:.0%}.",
            "",
            "| federation | heterogeneity | honest sites wrongly accused | most turns behind | `exclude` | "
            "harmful attackers accused | accuracy, no attack |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "| attack | accused where harmful | accused in all |",
            "| --- | --- | --- |",
            missed(runs),
            "",
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    runs = [json.loads(line) for line in lines]
    done = {key(run) for run in runs}
    for cell, seed, attack in planned():
        if (cell, seed, attack) in done:
            continue
        runs.append(one_run(cell, seed, attack) | {"machine": machine(), "versions": versions()})
        lines.append(json.dumps(runs[-1]))
        replace_file(RESULT, ("\n".join(lines) + "\n").encode())
    replace_file(PAGE, page(runs).encode())


if __name__ == "__main__":
    main()
