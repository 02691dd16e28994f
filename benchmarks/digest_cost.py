"""What a round of FedDig costs with one of four sites absent, over one with all there.

`python -m benchmarks.digest_cost` writes benchmarks/results/digest_cost.json. Processor time of all
parties of the round, in one process on one thread; rounds with and without the site alternate within one run,
so that other work on the machine counts little. The sites' data are of one size, and the server trains once
over all digests in a round: with more of that training, which every round has, the ratio is nearer to 1.
"""

import json
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

from benchmarks.environment import machine, versions
from benchmarks.table import EXPERIMENTS, RESULTS
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

ROUNDS, WARM = 16, 4
"""Rounds of a run, and how many at its start are left out: that is where digests are lent."""
ABSENT = "site-0"


def round_seconds(changes: dict[str, Any]) -> list[float]:
    """Processor seconds of each round of feddig_digits.yaml with changes, ROUNDS of them."""
    common: dict[str, Any] = {
        "tasks.rounds": ROUNDS,
        "data.partition": {"kind": "iid"},
        "evaluation.every": "task",
    }
    overrides = ";".join(f"{key}={json.dumps(value)}" for key, value in (common | changes).items())
    ends = [time.process_time()]

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run_in_process(
            RunSettings(str(EXPERIMENTS / "feddig_digits.yaml"), overrides, runs=folder), listener=listener
        )
    return [after - before for before, after in pairwise(ends)]


def every_other_round() -> list[dict[str, Any]]:
    """The `absence` block in which one site is away in each even round."""
    rounds = range(2, ROUNDS + 1, 2)
    return [{"site": ABSENT, "first_round": number, "last_round": number} for number in rounds]


def compared(per_digest: int) -> dict[str, float]:
    """Medians with all there and with one absent, and the median ratio of rounds that follow each other."""
    changes = {"strategy.server_epochs": 1, "digests.per_digest": per_digest, "absence": every_other_round()}
    seconds = round_seconds(changes)[WARM:]
    present, absent = seconds[::2], seconds[1::2]
    ratios = [away / there for away, there in zip(absent, present, strict=True)]
    return {
        "all there": round(statistics.median(present), 3),
        "one of four absent": round(statistics.median(absent), 3),
        "ratio": round(statistics.median(ratios), 2),
        "largest ratio": round(max(ratios), 2),
    }


def main() -> None:
    """Measure for several sizes of digests, and for plain averaging; print and write."""
    result: dict[str, Any] = {
        "processor seconds of a round, by samples in a digest": {str(size): compared(size) for size in (4, 1)}
    }
    plain = round_seconds({"strategy": "fedavg", "absence": []})[WARM:]
    result["processor seconds of a round of FedAvg"] = round(statistics.median(plain), 3)
    result |= {"rounds": ROUNDS - WARM, "versions": versions(), "machine": machine()}
    RESULTS.joinpath("digest_cost.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
