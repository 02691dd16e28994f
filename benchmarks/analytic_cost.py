"""What a head in closed form costs: `python -m benchmarks.analytic_cost`.

2,561 features with the constant (EfficientNet-Lite0's 1,280 and an expansion as wide) and 100 classes, on one
core: seconds to add 10,000 samples up, seconds to solve for each head, each in a process of its own whose
largest resident memory is taken from outside, and the bytes of a task's sums as Flower serialises them.
Samples are drawn: neither sums nor solution take another number of steps for
other values. Results: results/analytic_cost.json.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.environment import machine, versions
from benchmarks.processes import measured
from benchmarks.table import RESULTS
from perennial.foundation.files import replace_file
from perennial.learning.analytic.solve import LinearHead, Sums, gaussian, gcv, ridge
from perennial.learning.analytic.statistics import Collector, Statistics, SumsForm
from perennial.models.feature_maps.ball import on_grid

WIDTH, CLASSES, SAMPLES, BATCH = 2_561, 100, 10_000, 1_000
CANDIDATES = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
STAMP: dict[str, Any] = {
    "run": "0" * 16,
    "experiment": "0" * 64,
    "class_order": "0" * 64,
    "task": 1,
    "round": 1,
    "num_classes": CLASSES,
}


def drawn_sums(width: int = WIDTH, classes: int = CLASSES, samples: int = SAMPLES) -> Statistics:
    """Sums over drawn samples whose classes lie apart."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, width - 1, generator=generator)
    collector = Collector(width - 1, range(classes))
    for _ in range(0, samples, BATCH):
        labels = torch.randint(classes, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, width - 1, generator=generator)
        collector.add(on_grid((0.3 * centres[labels] + noise).relu()), labels)
    return collector.finish()


def _by_gcv(sums: Sums) -> float:
    return min(zip(gcv(sums, CANDIDATES, standardise=True), CANDIDATES, strict=True))[1]


HEADS: dict[str, Callable[[Sums], LinearHead]] = {
    "gaussian": lambda sums: gaussian(sums, 0.1),
    "ridge": lambda sums: ridge(sums, 1e-2, standardise=True),
    "ridge by gcv": lambda sums: ridge(sums, _by_gcv(sums), standardise=True),
}


def solved(head: str) -> dict[str, float]:
    """Seconds of one solution, from integer sums to the tensors of the saved head."""
    clock = time.perf_counter
    start = clock()
    statistics = drawn_sums()
    added = clock()
    tensors = HEADS[head](Sums.of(statistics)).tensors()
    ended = clock()
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    return {"seconds to add up": added - start, "seconds to solve": ended - added}


def nothing() -> dict[str, float]:
    """What a process that has imported everything holds."""
    return {}


def message_bytes(statistics: Statistics) -> int:
    """Of one site's answer, as Flower serialises it."""
    from perennial.deploy.flower_seam import recorddict_to_proto
    from perennial.protocol.messages import StatisticsReply
    from perennial.protocol.tensors import Tensors

    tensors = Tensors(gram=statistics.gram, sums=statistics.sums, counts=statistics.counts)
    reply = StatisticsReply(**STAMP, of_task=1, features="0" * 64, statistics=tensors)
    return recorddict_to_proto(reply.to_record()).ByteSize()


def main(times: int = 3) -> dict[str, Any]:
    """Measure, write the result file, and return what it holds."""
    module = ("-m", "benchmarks.analytic_cost")
    empty = measured(*module, "nothing").peak_kib
    heads = {}
    for head in HEADS:
        runs = [measured(*module, head) for _ in range(times)]
        heads[head] = {
            "seconds to solve": sorted(round(run.found["seconds to solve"], 3) for run in runs),
            "seconds to add up": sorted(round(run.found["seconds to add up"], 3) for run in runs),
            "peak MiB": round(max(run.peak_kib for run in runs) / 1024),
        }
    sent, bound = message_bytes(drawn_sums(samples=BATCH)), SumsForm(WIDTH).bytes(CLASSES)
    result = {
        "features with the constant": WIDTH,
        "classes": CLASSES,
        "samples": SAMPLES,
        "peak MiB of a process that only imports": round(empty / 1024),
        "heads": heads,
        "message bytes": sent,
        "(D(D+1)/2 + C D + C) x 8": bound,
        "message over it": round(sent / bound, 6),
        "threads": 1,
        "versions": versions(("flwr", "torch", "numpy", "scipy")),
        "machine": machine(),
    }
    replace_file(RESULTS / "analytic_cost.json", (json.dumps(result, indent=1) + "\n").encode(), mode=0o644)
    return result


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(nothing() if sys.argv[1] == "nothing" else solved(sys.argv[1])))
    else:
        print(json.dumps(main(), indent=1))
