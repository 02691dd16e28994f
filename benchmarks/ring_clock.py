"""Seconds of a round of one ring, of sub-rings and of FedAvg: `python -m benchmarks.ring_clock`.

Ten sites in ten processes. Each waits WAIT seconds before it trains, in place of a hospital's own computing
and network, which are most of a turn there and almost none of it on one machine. The time of a round is the
server's, from its first request to its model; that of a run's first round, in which processes warm up, is
left out. Writes benchmarks/results/ring_clock.json.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context, Message

from benchmarks.environment import machine, versions
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine import run as engine
from perennial.foundation.files import replace_file

EXPERIMENT = APP_ROOT / "experiments" / "fedavg_dirichlet_digits.yaml"
RESULT = Path(__file__).parent / "results" / "ring_clock.json"
SITES, ROUNDS, WAIT = 10, 5, 0.25
ROWS = {
    "one ring": ("strategy={name: parallel_rings, rings: 1}", 10),
    "2 sub-rings": ("strategy={name: parallel_rings, rings: 2}", 5),
    "5 sub-rings": ("strategy={name: parallel_rings, rings: 5}", 2),
    "FedAvg": ("strategy=fedavg", 1),
}
"""change -> turns of a round that follow one another."""


@contextmanager
def slow_sites() -> Iterator[None]:
    """Sites whose work takes WAIT seconds longer; they are forked after this begins."""
    prompt = engine.answer

    def slow(message: Message, context: Context) -> Message:
        if message.metadata.message_type.startswith("train"):
            time.sleep(WAIT)
        return prompt(message, context)

    engine.answer = slow
    try:
        yield
    finally:
        engine.answer = prompt


def seconds(change: str) -> list[float]:
    """Of each round but the first."""
    found: list[float] = []

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            found.append(event["seconds"])

    overrides = json.dumps([change, f"tasks.rounds={ROUNDS}", "evaluation.every=task"])
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(str(EXPERIMENT), overrides, runs=folder, device="cpu")
        engine.run_in_process(settings, workers=SITES, listener=listener)
    return found[1:]


def main() -> None:
    with slow_sites():
        times = {label: seconds(change) for label, (change, _) in ROWS.items()}
    whole = median(times["one ring"])
    result = {
        "experiment": EXPERIMENT.stem,
        "sites": SITES,
        "seconds that a site waits": WAIT,
        "rounds": ROUNDS - 1,
        "turns that follow one another": {label: turns for label, (_, turns) in ROWS.items()},
        "seconds of a round": {label: round(median(found), 3) for label, found in times.items()},
        "least and most": {label: [round(min(f), 3), round(max(f), 3)] for label, f in times.items()},
        "share of one ring's": {label: round(median(f) / whole, 3) for label, f in times.items()},
        "machine": machine(),
        "versions": versions(),
    }
    replace_file(RESULT, (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
