"""Shared noise against noise of a trusted server: `python -m perennial.benchmarks.shared_noise [SEED]...`.

The two digits experiments with 40 sites: client_central; client_shared with m = n; client_shared with
m = 0.75 n, beside client_central at the multiplier that n parts of that size come to. One line for each run
goes to results/shared_noise.jsonl, and runs that are there already are not made again.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process

RESULTS = Path(__file__).with_name("results") / "shared_noise.jsonl"
SIGMA = 2.0
"""Of the published row of mode client_central."""
ARMS: dict[str, tuple[str, list[str]]] = {
    "central": ("dp_central_digits", ["privacy.accountant=rdp", f"privacy.noise_multiplier={SIGMA}"]),
    "shared, m = n": ("shared_noise_digits", []),
    "central, sigma sqrt(n/m)": (
        "dp_central_digits",
        ["privacy.accountant=rdp", f"privacy.noise_multiplier={SIGMA * math.sqrt(40 / 30):.6f}"],
    ),
    "shared, m = 0.75 n": ("shared_noise_digits", ["secure.quorum=30"]),
}


def run_arm(arm: str, seed: int, folder: str) -> dict[str, object]:
    """Final accuracy and epsilon of one run."""
    experiment, overrides = ARMS[arm]
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / f"{experiment}.yaml"),
        overrides=json.dumps([*overrides, f"seed={seed}"]),
        runs=folder,
        device="cpu",
    )
    summary = run_in_process(settings)
    epsilon = summary["epsilon"]
    assert isinstance(epsilon, dict)
    return {
        "arm": arm,
        "seed": seed,
        "final_accuracy": summary["final_accuracy"],
        "epsilon": epsilon["value"],
        "delta": epsilon["delta"],
        "seconds": summary["seconds"],
    }


def main() -> None:
    """The runs that are missing, for the seeds on the command line or for 1 to 5."""
    seeds = [int(seed) for seed in sys.argv[1:]] or [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(line["arm"], line["seed"]) for line in lines}
    for seed in seeds:
        for arm in ARMS:
            if (arm, seed) not in done:
                with tempfile.TemporaryDirectory() as folder:
                    line = json.dumps(run_arm(arm, seed, folder))
                print(line, flush=True)
                with RESULTS.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
