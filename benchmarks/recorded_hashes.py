"""Hashes of the models of short runs: `python -m perennial.benchmarks.recorded_hashes [write]`.

Without `write` the runs of recorded_runs.yaml are made again and compared with results/recorded_hashes.json;
the exit status is 1 when one differs. A change that is not meant to touch the arithmetic leaves all of them
as they are. Bits depend on the processor and the builds of the libraries, so a comparison says something only
on the kind of machine that wrote the file, which is named in it.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml

from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.server.summary import MODEL_HASHES, hashes_of

RUNS = Path(__file__).with_name("recorded_runs.yaml")
RECORD = Path(__file__).with_name("results") / "recorded_hashes.json"


def machine() -> dict[str, str]:
    """What the bits depend on besides the code."""
    return {
        "processor": _processor(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def hashes_of_run(experiment: str, overrides: list[str], runs: Path) -> dict[str, Any]:
    """The hashes of the models of one short run: the global one, those of groups, and the sites' own."""
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / f"{experiment}.yaml"),
        overrides=json.dumps(overrides),
        runs=str(runs),
        device="cpu",
    )
    return hashes_of(run_in_process(settings))


def hashes() -> dict[str, dict[str, Any]]:
    """Kind of model -> recorded run -> hash, or hashes by group or site where there are any."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {kind: {} for kind in MODEL_HASHES}
    for name, run in yaml.safe_load(RUNS.read_text()).items():
        with tempfile.TemporaryDirectory() as folder:
            kinds = hashes_of_run(run["of"], run["set"], Path(folder))
        for kind, value in kinds.items():
            if value:
                found[kind][name] = value
        print(name, kinds["model_sha256"], flush=True)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def main() -> int:
    found = hashes()
    if sys.argv[1:] == ["write"]:
        content = {"machine": machine(), **found}
        replace_file(RECORD, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
        return 0
    recorded = json.loads(RECORD.read_text())
    if recorded["machine"] != machine():
        print(f"recorded on another machine: {recorded['machine']}; this one: {machine()}")
    for kind in found.keys() - recorded.keys():
        print(f"{kind}: nothing recorded yet")
    changed = [
        (kind, name)
        for kind, runs in found.items()
        if kind in recorded
        for name in sorted({*runs, *recorded.get(kind, {})})
        if recorded.get(kind, {}).get(name) != runs.get(name)
    ]
    for kind, name in changed:
        print(f"{name}: {kind}: recorded {recorded.get(kind, {}).get(name)}, found {found[kind].get(name)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
