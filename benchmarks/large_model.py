"""Largest memory of a run whose model is 485 MB of float32, at two sites in one process.

What a process takes that runs the same with a model of a few kilobytes (Python, its libraries, the data) is
measured beside it. `python -m benchmarks.large_model write` keeps the figures in
results/large_model.json; `run CASE WIDTH` is one such process.
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import machine, versions
from benchmarks.processes import measured
from perennial import run

WIDTH = 5500
"""Of each of five hidden layers: 121.4 million values."""
BARE = 8
EXPERIMENT = """\
name: large
seed: 1
data: {{source: digits, sites: 2, test_fraction: 0.5}}
tasks: {{count: 2, order: seeded, rounds: 2}}
model: {{name: mlp, hidden: [{width}, {width}, {width}, {width}, {width}]}}
learner:
  preset: none
  epochs: 2
  batch_size: 1024
  optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
{more}
strategy: fedavg
evaluation: {{every: task}}
"""
CASES = {
    "updates alone": "",
    "distillation and exemplars": "  distillation: {weight: 1.0}\n  memory: {per_class: 4}",
}
MODULE = "benchmarks.large_model"
RESULT = Path(__file__).with_name("results") / "large_model.json"


def one(case: str, width: int) -> dict[str, object]:
    """Run one case; its hash, and the bytes of its model's file."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "large.yaml"
        experiment.write_text(EXPERIMENT.format(width=width, more=CASES[case]))
        done = run(experiment, name="large", runs=Path(folder))
        size = (done.folder / "model.safetensors").stat().st_size
        return {"model_sha256": done.summary["model_sha256"], "model_bytes": size}


def compared(case: str) -> dict[str, object]:
    """One case with the large model and with a tiny one. Multiples are of the model's size."""
    large, bare = (measured("-m", MODULE, "run", case, str(width)) for width in (WIDTH, BARE))
    size = int(large.found["model_bytes"])
    return {
        "model_mb": round(size / 1e6, 1),
        "peak_mb": round(large.peak_kib * 1024 / 1e6),
        "peak_mb_of_a_tiny_model": round(bare.peak_kib * 1024 / 1e6),
        "times_the_model": round(large.peak_kib * 1024 / size, 2),
        "times_the_model_beyond_the_tiny_one": round((large.peak_kib - bare.peak_kib) * 1024 / size, 2),
        "model_sha256": large.found["model_sha256"],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]))))
    else:
        figures = {case: compared(case) for case in CASES}
        found = json.dumps({"seed": 1, **figures, "machine": machine(), **versions()}, indent=2)
        print(found)
        if sys.argv[1:] == ["write"]:
            RESULT.write_text(found + "\n")
