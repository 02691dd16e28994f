"""Hashes of the models of short runs: `python -m benchmarks.recorded_hashes [write]`.

Without `write` the runs of recorded_runs.yaml are made again and compared with results/recorded_hashes.json;
the exit status is 1 when one differs. A change that is not meant to touch the arithmetic leaves all of them
as they are. Bits depend on the processor and the builds of the libraries, so the file holds one record a kind
of machine, and nothing is compared on another kind. `write` replaces the record of this kind.
"""

import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import yaml
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.privacy import noise
from perennial.server.summary import MODEL_HASHES, extract_hashes

RUNS = Path(__file__).with_name("recorded_runs.yaml")
RECORD = Path(__file__).with_name("results") / "recorded_hashes.json"


def machine() -> dict[str, str]:
    """What the bits depend on besides the code."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
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
    return extract_hashes(run_in_process(settings))


@contextmanager
def repeated_noise() -> Iterator[None]:
    """Inside it the n-th stream of noise is the same in every run: the product has no noise that repeats."""
    drawn = itertools.count()

    def stream() -> CipherContext:
        return Cipher(algorithms.AES(next(drawn).to_bytes(32)), modes.CTR(bytes(16))).encryptor()

    with patch.object(noise, "open_stream", stream):
        yield


def hashes() -> dict[str, dict[str, Any]]:
    """Kind of model -> recorded run -> hash, or hashes by group or site where there are any."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {kind: {} for kind in MODEL_HASHES}
    for name, run in yaml.safe_load(RUNS.read_text()).items():
        with tempfile.TemporaryDirectory() as folder, repeated_noise():
            kinds = hashes_of_run(run["of"], run["set"], Path(folder))
        for kind, value in kinds.items():
            if value:
                found[kind][name] = value
        print(name, kinds["model_sha256"], flush=True)
    return found


def _processor() -> str:
    """Name, family, model and stepping: several processors have one name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return " ".join(facts[name] for name in names if name in facts) or platform.machine()


def main() -> int:
    records: list[dict[str, Any]] = json.loads(RECORD.read_text())
    (recorded,) = [each for each in records if each["machine"] == machine()] or [None]
    if sys.argv[1:] == ["write"]:
        kept = [each for each in records if each["machine"] != machine()]
        content = [*kept, {"machine": machine(), **hashes()}]
        replace_file(RECORD, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
        return 0
    if recorded is None:
        print(f"nothing is recorded of this kind of machine, so nothing is compared: {machine()}")
        return 0
    found = hashes()
    changed = [
        (kind, name)
        for kind, runs in found.items()
        for name in sorted({*runs, *recorded.get(kind, {})})
        if recorded.get(kind, {}).get(name) != runs.get(name)
    ]
    for kind, name in changed:
        print(f"{name}: {kind}: recorded {recorded.get(kind, {}).get(name)}, found {found[kind].get(name)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
