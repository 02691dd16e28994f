"""What bounds and the median cost the server: `python -m benchmarks.robust_cost`.

One round of ten sites with ResNet-18's 11.2 million values each, from received bytes to the new model: the
gate, the bounds, then the rule. The mean adds each update as it comes; the median keeps all of them on disk
until the last one is there. Rules take turns in one process, seconds are the processor's, and a ratio is of
the same turn, so that the machine's load cancels out. Memory is the peak of a process of its own, above that
of the plain mean, with ten sites and with twenty. Writes benchmarks/results/robust_cost.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from benchmarks.aggregation import DISTINCT, STAMP, reference, reply, update
from benchmarks.environment import machine, versions
from perennial.config.bounds import BoundsConfig
from perennial.engine.grid import set_task_identity
from perennial.foundation.files import replace_file
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.parallel import collect
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.round.running_bounds import COUNTS, NORMS, RunningBounds
from perennial.strategies.sums.update_file import KEPT_BYTES

RESULT = Path(__file__).parent / "results" / "robust_cost.json"
SITES, REPEATS = 10, 7
PLAIN = "mean, no bounds"
RULES = {PLAIN: "fedavg", "mean, default bounds": "fedavg", "median": "median"}


def messages(like: Mapping[str, Tensor], sites: int) -> Iterator[Message]:
    """The replies of a round, one in memory at a time."""
    for number in range(sites):
        record = reply(update(dict(like), number % DISTINCT), dict(like), 100).content
        yield Message(record, reply_to=Message(RecordDict(), number + 1, "train"))


def one_round(rule: str, like: Mapping[str, Tensor], replies: Iterator[Message] | list[Message]) -> float:
    """Seconds of a round that is not a run's first one, whose bounds follow from former rounds."""
    strategy = build_strategy(RULES[rule], {})
    bounds = BoundsConfig()
    former = {NORMS: [100.0], COUNTS: {f"site-{number}": 100 for number in range(SITES)}}
    running = None if rule == PLAIN else RunningBounds(bounds, former)
    request = RoundRequest(STAMP, like, {}, 1.0, known=SITES, bounds=bounds, running=running)
    ctx = strategy.context(cast(Any, None), request)
    start = time.process_time()
    aggregator = strategy.aggregator(ctx)
    assert collect(ctx, aggregator, strategy.traits, strategy.exchange, replies), ctx.outcome.dropped
    aggregator.result()
    return time.process_time() - start


def peak(rule: str, sites: int) -> int:
    """Largest resident memory of a process that makes one round, in MiB."""
    like = reference()
    one_round(rule, like, messages(like, sites))
    # getrusage would tell the peak of the process that started this one, if that was larger
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) // 1024


def peak_apart(rule: str, sites: int) -> int:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, rule, str(sites)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peaks() -> dict[int, dict[str, int]]:
    """Number of sites -> rule -> MiB above the plain mean."""
    found = {}
    for sites in (SITES, 2 * SITES):
        memory = {rule: peak_apart(rule, sites) for rule in RULES}
        found[sites] = {rule: each - memory[PLAIN] for rule, each in memory.items()}
    return found


def ratios(times: Mapping[str, list[float]], of: str) -> dict[str, list[float]]:
    """label -> [median, least, largest] ratio to `of` in the same turn."""
    found = {
        label: [value / plain for value, plain in zip(values, times[of], strict=True)]
        for label, values in times.items()
    }
    return {label: [round(f(each), 3) for f in (median, min, max)] for label, each in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    set_task_identity()
    like = reference()
    replies = list(messages(like, SITES))
    times: dict[str, list[float]] = {rule: [] for rule in RULES}
    one_round(PLAIN, like, replies[:1])
    for _ in range(REPEATS):
        for rule, taken in times.items():
            taken.append(one_round(rule, like, replies))
    del replies
    memory = peaks()
    floats = sum(tensor.numel() for tensor in like.values())
    size = 4 * floats
    result = {
        "values": floats,
        "sites": SITES,
        "MB on disk while a round is compared": round((SITES - KEPT_BYTES // size) * size / 1e6),
        "seconds of a round": {rule: round(median(taken), 3) for rule, taken in times.items()},
        "ratio to the plain mean: median, least, largest": ratios(times, PLAIN),
        "peak MiB above the plain mean, by sites": memory,
        "machine": machine(),
        "versions": versions(),
    }
    replace_file(RESULT, (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        set_task_identity()
        print(peak(sys.argv[1], int(sys.argv[2])))
    else:
        main()
