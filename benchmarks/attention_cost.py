"""What layer attention costs the server beside plain averaging: time and memory for updates of a ResNet-18.

`python -m benchmarks.attention_cost [OUTPUT]` aggregates 50 updates by each rule in one process,
alternating, and writes medians to benchmarks/results/attention_cost.json (or OUTPUT). A ratio is the median
over the turns of a rule's time by that of the plain average in the same turn, so that the machine's load
cancels out. Memory is what the sums hold when all updates are in; an update itself is dropped
once it is folded.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.aggregation import STAMP
from benchmarks.environment import machine, versions
from perennial.foundation.streams import stream, torch_seed
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import travelling
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.layer_attention import AttendedLayers, LayerAttention
from perennial.strategies.round.context import Aggregator
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import RoundRequest

SITES, REPEATS = 50, 2
PLAIN = "fedavg"
RULES: Mapping[str, Mapping[str, Any]] = {
    "layer_attention": {},
    "layer_attention, scale mean (two passes)": {"scale": "mean"},
}


def updates(reference: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """count updates whose norms differ as those of sites do."""
    generator = torch.Generator().manual_seed(torch_seed(stream(1, "attention-cost")))
    return [
        {
            name: (0.01 + 0.002 * number) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in reference.items()
        }
        for number in range(count)
    ]


def one_round(
    strategy: IncrementalStrategy, reference: Mapping[str, Tensor], some: list[dict[str, Tensor]], sites: int
) -> tuple[float, Aggregator]:
    """Seconds of one round's arithmetic, from the first reply to the new model, and what made it."""
    norms = [float(torch.cat([tensor.reshape(-1) for tensor in update.values()]).norm()) for update in some]
    replies = [
        Admitted(f"site-{site:02}", some[site % len(some)], norms[site % len(some)], 100)
        for site in range(sites)
    ]
    request = RoundRequest(STAMP, reference, {}, 1.0, known=1024)
    start = time.perf_counter()
    aggregator = strategy.aggregator(strategy.context(cast(Any, None), request))
    for reply in replies:
        aggregator.add(reply)
    aggregator.result()
    return time.perf_counter() - start, aggregator


def sums_bytes(
    strategy: LayerAttention, reference: Mapping[str, Tensor], some: list[dict[str, Tensor]], sites: int
) -> int:
    """Bytes of the accumulators of a round with so many sites."""
    aggregator = one_round(strategy, reference, some, sites)[1]
    assert isinstance(aggregator, AttendedLayers)
    return aggregator.sums_bytes


def main(output: Path) -> None:
    """Measure, alternating between the rules, and write the medians and their ratios."""
    torch.set_num_threads(1)
    model = build_model(ModelConfig.model_validate({"name": "resnet18"}), (3, 32, 32), 100, seed=1)
    reference = {name: tensor.clone() for name, tensor in travelling(model).items()}
    some = updates(reference, 4)
    attention = {label: LayerAttention(**keywords) for label, keywords in RULES.items()}
    strategies: dict[str, IncrementalStrategy] = {PLAIN: FedAvg(), **attention}
    times: dict[str, list[float]] = {label: [] for label in strategies}
    for strategy in strategies.values():
        # the first sum of a large model compiles its loop
        one_round(strategy, reference, some, 1)
    for _ in range(REPEATS):
        for label, strategy in strategies.items():
            times[label].append(one_round(strategy, reference, some, SITES)[0])
    ratios = {
        label: [rule / plain for rule, plain in zip(values, times[PLAIN], strict=True)]
        for label, values in times.items()
    }
    literal = attention["layer_attention"]
    held = {str(sites): sums_bytes(literal, reference, some, sites) for sites in (SITES, len(some))}
    result = {
        "model": "resnet18, 100 classes",
        "floats": sum(tensor.numel() for tensor in reference.values()),
        "sites": SITES,
        "repeats": REPEATS,
        "seconds": {label: round(statistics.median(values), 3) for label, values in times.items()},
        "times plain averaging": {
            label: round(statistics.median(values), 2) for label, values in ratios.items()
        },
        "least and largest ratio": {
            label: [round(min(values), 2), round(max(values), 2)] for label, values in ratios.items()
        },
        "bytes of the sums, by sites": held,
        "versions": versions(),
        "machine": machine(),
    }
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    default = Path(__file__).resolve().parent / "results" / "attention_cost.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
