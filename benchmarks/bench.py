"""What Perennial costs, measured side by side: `make bench`, or `bench NAME...` for some figures.

Writes build/bench/bench.jsonl, one object a figure, and a table of this machine's values beside the committed
ones in build/bench/bench.md. With --record it writes the committed figures instead, which the tests hold to
their bounds: benchmarks/results/bench.jsonl and the table in docs/performance.md. A figure that is not named
keeps its line.
Each value is the median of its samples, and each sample is a ratio of two runs that followed each other, so
the machine's speed cancels out.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.environment import machine, versions
from benchmarks.flower_simulation import FlowerSimulation
from benchmarks.processes import Ended, in_turns, measured
from benchmarks.workloads import WORKLOADS, write_workload
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "bench.jsonl"
OWN = ROOT / "build" / "bench" / "bench.jsonl"
"""What somebody measures on a machine of their own; no test reads it."""
PAGE = ROOT / "docs" / "performance.md"
TABLE_MARK = "<!-- figures -->"
RECORD = "--record"


@dataclass(frozen=True)
class Measured:
    """The measurements of one figure.

    samples: one number a repetition.
    facts: what else was seen, JSON-able.
    """

    samples: list[float]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure of the page of measurements, with the bound that it must keep.

    meaning: one line for a reader.
    bound: what the value must keep, on the side that `side` says.
    """

    meaning: str
    side: Literal["at most", "at least"]
    bound: float
    measure: Callable[[Path], Measured]

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.side == "at most" else value >= self.bound


def engine(workload: str, folder: Path, workers: int = 1, cohort: str = "1") -> Callable[[], Ended]:
    """A run of a workload in the in-process engine, in a run folder of its own each time."""

    def run() -> Ended:
        with _empty(folder) as runs:
            return measured(
                *(
                    "-m",
                    "benchmarks.engine_run",
                    workload,
                    "--runs",
                    str(runs),
                    "--workers",
                    str(workers),
                    "--cohort",
                    cohort,
                )
            )

    return run


def engine_vs_plain_loop(
    workload: str, times: int, workers: int = 1, cohort: str = "1"
) -> Callable[[Path], Measured]:
    """Seconds of the rounds: the engine's over the plain loop's."""

    def measure(folder: Path) -> Measured:
        plain, ours = in_turns(
            times,
            [
                lambda: measured("-m", "benchmarks.plain_loop", workload),
                engine(workload, folder, workers, cohort),
            ],
        )
        steps = {run.found["steps"] for run in (*plain, *ours)}
        if len(steps) != 1:
            raise RuntimeError(f"{workload}: different numbers of local steps: {sorted(steps)}")
        return Measured(
            _ratios(ours, plain, "seconds"),
            {
                "cpu_samples": _ratios(ours, plain, "cpu_seconds"),
                "plain_seconds": [run.found["seconds"] for run in plain],
                "engine_seconds": [run.found["seconds"] for run in ours],
                "steps": steps.pop(),
            },
        )

    return measure


def two_workers_vs_one(folder: Path) -> Measured:
    one, two = in_turns(7, [engine("w1", folder), engine("w1", folder, workers=2)])
    if len({run.found["model_sha256"] for run in (*one, *two)}) != 1:
        raise RuntimeError("w1: one and two workers gave different models")
    seconds = {"one_seconds": one, "two_seconds": two}
    facts = {name: [run.found["seconds"] for run in runs] for name, runs in seconds.items()}
    return Measured(_ratios(two, one, "seconds"), facts)


def flwr_run_vs_engine(folder: Path) -> Measured:
    experiment = write_workload("w1", folder)
    sites = WORKLOADS["w1"]["data"]["sites"]
    ours: list[float] = []
    theirs: list[float] = []
    models: set[str] = set()
    with FlowerSimulation(folder / "flower") as simulation:
        for turn in range(3):
            runs = folder / f"runs-{turn}"
            theirs.append(
                simulation.run(
                    sites, {"experiment": str(experiment), "runs": str(runs), "name": "flwr"}
                ).seconds
            )
            # Ray has every core of the machine, and so has the engine
            command = ("run", str(experiment), "--runs", str(runs), "--name", "engine", "--device", "cpu")
            command += ("--workers", str(len(os.sched_getaffinity(0))))
            ours.append(measured("-m", "perennial.cli.main", *command).seconds)
            for name in ("flwr", "engine"):
                models.add(json.loads((runs / name / "summary.json").read_text())["model_sha256"])
    if len(models) != 1:
        raise RuntimeError("w1: flwr run and the engine gave different models")
    return Measured(
        [flower / engine for flower, engine in zip(theirs, ours, strict=True)],
        {"flwr_run_seconds": theirs, "engine_seconds": ours},
    )


def memory_100_vs_10_sites(folder: Path) -> Measured:
    ten, hundred = in_turns(3, [engine("memory_10", folder), engine("memory_100", folder)])
    peaks = {"peak_kib_10": ten, "peak_kib_100": hundred}
    return Measured(
        [b.peak_kib / a.peak_kib for a, b in zip(ten, hundred, strict=True)],
        {name: [run.peak_kib for run in runs] for name, runs in peaks.items()},
    )


def aggregation_vs_flower(folder: Path) -> Measured:
    found = measured("-m", "benchmarks.aggregation", "time", "--repeats", "5").found
    peaks = {n: measured("-m", "benchmarks.aggregation", "peak", "--updates", str(n)) for n in (10, 100)}
    return Measured(
        [ours / theirs for ours, theirs in found["seconds"]],
        {
            "seconds": found["seconds"],
            "distance": found["distance"],
            "update_kib": peaks[10].found["update_kib"],
            **{f"peak_kib_{n}_updates": run.found["peak_kib"] for n, run in peaks.items()},
        },
    )


def protection(kind: str) -> Callable[[Path], Measured]:
    """The ratios of benchmarks/privacy_cost.py."""

    def measure(folder: Path) -> Measured:
        found = measured("-m", "benchmarks.privacy_cost", kind).found
        return Measured(found.pop("ratios"), found)

    return measure


def help_seconds(folder: Path) -> Measured:
    runs = [measured("-m", "perennial.cli.main", "--help") for _ in range(9)]
    return Measured([run.seconds for run in runs], {"cpu_seconds": [run.cpu_seconds for run in runs]})


FIGURES: dict[str, Figure] = {
    "engine_vs_plain_loop_w1": Figure(
        "rounds of W1: engine over a plain PyTorch loop", "at most", 1.1, engine_vs_plain_loop("w1", 9)
    ),
    "engine_vs_plain_loop_w2": Figure(
        "rounds of W2: engine over a plain PyTorch loop", "at most", 1.25, engine_vs_plain_loop("w2", 9)
    ),
    "cohorts_vs_plain_loop_w1": Figure(
        "rounds of W1 with `--cohort auto`: engine over a plain PyTorch loop",
        "at most",
        0.65,
        engine_vs_plain_loop("w1", 9, cohort="auto"),
    ),
    "cohorts_vs_plain_loop_w2": Figure(
        "rounds of W2 with `--cohort auto`: engine over a plain PyTorch loop",
        "at most",
        0.75,
        engine_vs_plain_loop("w2", 9, cohort="auto"),
    ),
    "two_workers_cohorts_vs_plain_loop_w1": Figure(
        "rounds of W1 with `--cohort auto --workers 2`: engine over a plain PyTorch loop",
        "at most",
        0.42,
        engine_vs_plain_loop("w1", 9, workers=2, cohort="auto"),
    ),
    "two_workers_cohorts_vs_plain_loop_w2": Figure(
        "rounds of W2 with `--cohort auto --workers 2`: engine over a plain PyTorch loop",
        "at most",
        0.55,
        engine_vs_plain_loop("w2", 9, workers=2, cohort="auto"),
    ),
    "two_workers_vs_one": Figure("rounds of W1: two workers over one", "at most", 0.65, two_workers_vs_one),
    "flwr_run_vs_engine": Figure(
        "W1, start to exit: `flwr run` over `perennial run`", "at least", 5.0, flwr_run_vs_engine
    ),
    "memory_100_vs_10_sites": Figure(
        "peak memory: 100 sites over 10, same data", "at most", 1.5, memory_100_vs_10_sites
    ),
    "aggregation_vs_flower": Figure(
        "100 ResNet-18 updates: gate and exact sum over Flower's sum", "at most", 1.0, aggregation_vs_flower
    ),
    "client_protection_overhead": Figure(
        "rounds of W1: updates clipped, noised and charged at the sites, over the same without",
        "at most",
        1.02,
        protection("site"),
    ),
    "client_protection_overhead_long": Figure(
        "the same at two sites of 700 samples, whose turns are longer", "at most", 1.02, protection("long")
    ),
    "sample_training_vs_opacus": Figure(
        "DP-SGD at a site over Opacus used directly", "at most", 1.5, protection("sample")
    ),
    "help_seconds": Figure("seconds of `perennial --help`", "at most", 0.3, help_seconds),
}


def bench(names: list[str], record: bool = False) -> list[dict[str, Any]]:
    """Measure the named figures, all when none is named, and store each as soon as it is there.

    record: as the committed figures, and not as this machine's own.
    """
    path = RESULTS if record else OWN
    unknown = sorted(set(names) - FIGURES.keys())
    if unknown:
        raise SystemExit(f"unknown figures: {', '.join(unknown)}; known: {', '.join(FIGURES)}")
    for name in names or FIGURES:
        figure = FIGURES[name]
        with tempfile.TemporaryDirectory() as folder:
            load = os.getloadavg()[0]
            found = figure.measure(Path(folder))
        entry = {
            "name": name,
            "value": round(median(found.samples), 4),
            "bound": figure.bound,
            "side": figure.side,
            "samples": found.samples,
            "facts": found.facts,
            "seed": 1,
            "versions": versions(("flwr", "ray", "torch", "numpy")),
            "machine": machine(),
            "load_before": round(load, 2),
        }
        store(entry, path)
        verdict = "holds" if figure.holds(entry["value"]) else "MISSED"
        print(f"{name}: {entry['value']:.3g} ({figure.side} {figure.bound:g}: {verdict})", flush=True)
    entries = read(path)
    if record:
        PAGE.write_text(with_table(PAGE.read_text(), entries))
    else:
        beside = path.with_suffix(".md")
        beside.write_text(table(entries, read()) + "\n")
        print(beside)
    return entries


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The stored figures, in the order of FIGURES."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = {entry["name"]: entry for entry in map(json.loads, lines)}
    return [entries[name] for name in FIGURES if name in entries]


def store(entry: dict[str, Any], path: Path = RESULTS) -> None:
    """Put entry in the place of the one of its name."""
    entries = {old["name"]: old for old in read(path)} | {entry["name"]: entry}
    lines = [json.dumps(entries[name]) + "\n" for name in FIGURES if name in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(lines).encode(), mode=0o644)


def table(entries: list[dict[str, Any]], committed: list[dict[str, Any]] | None = None) -> str:
    """The figures in Markdown, with the machine and the versions below.

    committed: the figures of the repository, shown beside; None: entries are those.
    """
    known = {entry["name"]: f"{entry['value']:.2f}" for entry in committed or []}
    last = "kept" if committed is None else "kept | committed"
    lines = [f"| figure | what | value | bound | {last} |", "| --- " * (5 + (committed is not None)) + "|"]
    for entry in entries:
        figure = FIGURES[entry["name"]]
        cells = (
            f"`{entry['name']}`",
            figure.meaning,
            f"{entry['value']:.2f}",
            f"{entry['side']} {entry['bound']:g}",
            "yes" if figure.holds(entry["value"]) else "no",
            *([known.get(entry["name"], "")] if committed is not None else []),
        )
        lines.append(f"| {' | '.join(cells)} |")
    where = sorted({_where(entry) for entry in entries})
    return "\n".join([*lines, "", *where])


def with_table(page: str, entries: list[dict[str, Any]]) -> str:
    """The page with its table of figures replaced."""
    before, _, rest = page.partition(TABLE_MARK)
    _, _, after = rest.partition(TABLE_MARK)
    return f"{before}{TABLE_MARK}\n{table(entries)}\n{TABLE_MARK}{after}"


def _where(entry: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in entry["versions"].items())
    return f"Measured on: {entry['machine']}; {versions}."


def _ratios(first: list[Ended], second: list[Ended], key: str) -> list[float]:
    return [a.found[key] / b.found[key] for a, b in zip(first, second, strict=True)]


@contextmanager
def _empty(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        yield Path(path)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    bench([name for name in arguments if name != RECORD], RECORD in arguments)
