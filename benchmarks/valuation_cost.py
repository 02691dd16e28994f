"""What contribution values measured during a ring's sweeps add to their computation.

`python -m benchmarks.valuation_cost` runs experiments/tricon_sf_digits.yaml with its valuation and
as the ring alone, by turns in one process, and writes benchmarks/results/valuation_cost.json. It is the worst
case for the share: turns of 36 samples each, and everything in one process, where nothing is valued while a
site is at work elsewhere. Processor time, because a machine may have other work.
"""

import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.strategies import contribution

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "experiments" / "tricon_sf_digits.yaml"
RESULT = Path(__file__).parent / "results" / "valuation_cost.json"
REPEATS, ROUNDS = 5, 6
ALONE = "strategy={name: serial_ring, segments: 4, reshuffle: sweep, relabel: permute, init_noise_std: 0.01}"


CONDITIONS = {
    "one sweep in four, as the experiment says": "strategy.every=4",
    "every sweep": "strategy.every=1",
}


@dataclass
class Rounds:
    """Processor seconds from the end of a run's first round to the end of its last."""

    first: float = 0.0
    last: float = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            self.last = time.process_time()
            self.first = self.first or self.last

    @property
    def seconds(self) -> float:
        return self.last - self.first


@contextmanager
def by_processor_time() -> Iterator[None]:
    """Valuations inside are timed by the processor and not by the clock on the wall."""
    clock, contribution.clock = contribution.clock, time.process_time
    try:
        yield
    finally:
        contribution.clock = clock


def one_run(*changes: str) -> tuple[float, dict[str, Any]]:
    """(processor seconds of all rounds but the first, summary) of one run."""
    rounds = Rounds()
    overrides = ";".join((f"tasks.rounds={ROUNDS}", "evaluation.every=task", *changes))
    with tempfile.TemporaryDirectory(prefix="perennial-bench-") as folder:
        summary = run_in_process(RunSettings(str(EXPERIMENT), overrides, runs=folder), listener=rounds)
    return rounds.seconds, summary


def main() -> None:
    """Measure by turns and write the medians."""
    shares: dict[str, list[float]] = {label: [] for label in CONDITIONS}
    added: dict[str, list[float]] = {label: [] for label in CONDITIONS}
    with by_processor_time():
        one_run(ALONE)
        for _ in range(REPEATS):
            alone, _ = one_run(ALONE)
            for label, change in CONDITIONS.items():
                seconds, summary = one_run(change)
                added[label].append(seconds / alone - 1)
                shares[label].append(summary["valuation"]["share_of_other_work"])
                print(f"{label}: {shares[label][-1]:.3f} of other work", flush=True)
    result = {
        "experiment": EXPERIMENT.stem,
        "rounds": ROUNDS,
        "repeats": REPEATS,
        "valuation, share of other work": {label: _spread(values) for label, values in shares.items()},
        "run over the ring alone, less 1": {label: _spread(values) for label, values in added.items()},
        "machine": f"{platform.machine()}, CPU, one thread",
    }
    replace_file(RESULT, (json.dumps(result, indent=2) + "\n").encode(), mode=0o644)
    print(json.dumps(result, indent=2))


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
