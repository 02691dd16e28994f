"""Fuzz what a stranger can send: messages and files. Nothing may crash, hang, grow, or end in the catch-all.

Each target takes bytes, which Hypothesis makes, and turns them into a message or a file. Each campaign is a
process of its own with a bound on its memory and on the time of one input: TARGET INPUTS REPORT.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.redteam.fuzz_inputs import Choices, changed_record, changed_yaml

RUNS = {"decode": 92_000, "yaml": 5_000, "site": 3_000}
"""Inputs of each target in the slow stage of the tests: 100,000 together."""
LONGEST_INPUT = 600
"""Bytes, which decide on a few hundred changes."""
SECONDS_FOR_ONE = 60
GIGABYTES = 5
GROWTH = 400 * 2**20
"""Bytes by which a campaign may grow after its first tenth; a leak of a message's tensors would be more."""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
STATE_LIMITS = {"runs": 5, "gigabytes": 0.05, "gigabytes_per_run": 0.05}
UNBOUNDED = {"max_runs": 10**9, "max_evaluations": 10**9}
"""Counts would refuse most of a campaign at the door, where it would see nothing of what is behind."""
EXPERIMENTS: tuple[dict[str, Any], ...] = (
    {},
    {
        "strategy": {"name": "scaffold"},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "means": "site"},
    },
    {"strategy": {"name": "serial_ring", "segments": 2}},
    {
        "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 2.0},
        "evaluation": {"federated": False},
    },
    {
        "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 2.0, "sample_rate": 0.2},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
        "evaluation": {"noise_multiplier": 4.0},
    },
    {"secure": {"least": 2}},
    {
        "model": {"name": "features", "features": [{"name": "random", "width": 20}]},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": "validation"},
        "learner": None,
    },
)

Target = Callable[[bytes], str]


class Failure(Exception):
    """An input that ended as none may. It is no PerennialError, so that nothing takes it for a refusal."""


def site_target(folder: Path) -> Target:
    """Any message to a deployed site is answered, or refused with a typed reason."""
    from perennial.client import request_count
    from perennial.protocol.messages import Refusal
    from tests.deployed_site import DeployedSite

    sites = []
    for number, experiment in enumerate(EXPERIMENTS):
        (folder / str(number)).mkdir()
        made = DeployedSite(folder / str(number), experiment=experiment, policy=UNBOUNDED, state=STATE_LIMITS)
        sites.append((made, made.every_request()))

    def send(data: bytes) -> str:
        choices = Choices(data)
        site, requests = choices.pick(sites)
        request = choices.pick(requests)
        record = changed_record(choices, request.to_record())
        # for this one request: a limit that stayed lifted would be lifted for every later test of the process
        with mock.patch.object(request_count, "REPEATS", 10**9):
            answer = site.send(record, request.message_type)
        if (outcome := site.outcome(answer)) != "refused":
            return outcome
        refusal = Refusal.from_record(answer)
        if refusal.kind == "error":
            raise Failure(f"{type(request).__name__}: {refusal.reason}")
        return f"refused: {refusal.kind}"

    return send


def decode_target(folder: Path) -> Target:
    """Any record becomes a message or a ProtocolError."""
    from perennial.foundation.errors import ProtocolError
    from tests.deployed_site import DeployedSite

    site = DeployedSite(folder)
    made = [(type(request), request.to_record()) for request in site.every_request()]

    def decode(data: bytes) -> str:
        choices = Choices(data)
        kind, record = choices.pick(made)
        try:
            kind.from_record(changed_record(choices, record)).to_record()
        except ProtocolError:
            return "refused"
        return "read"

    return decode


def yaml_target(folder: Path) -> Target:
    """Any text is an experiment, a site, or a ConfigError."""
    from perennial.config.experiment import Experiment, load_experiment
    from perennial.config.site import load_site_config
    from perennial.foundation.errors import ConfigError
    from perennial.strategies.factory import build_strategy
    from tests.deployed_site import merged

    site = {
        "site": "a",
        "state_dir": "s",
        "policy": {"answers": ["train"]},
        "connection": {"superlink": "a:1"},
    }
    site |= {"data": {"source": "folder", "path": "d", "labels": {"x": "y"}}, "state": {"runs": 3}}
    contents = [(load_site_config, site)]
    contents += [(load_experiment, merged(experiment)) for experiment in EXPERIMENTS]
    path = folder / "file.yaml"

    def read(data: bytes) -> str:
        choices = Choices(data)
        load, content = choices.pick(contents)
        path.write_text(changed_yaml(choices, content), encoding="utf-8", errors="replace")
        try:
            found = load(path)
            if isinstance(found, Experiment):
                build_strategy(found.strategy.name, found.strategy.parameters)
        except ConfigError as error:
            if len(str(error)) > 20_000:
                raise Failure(f"an error of {len(str(error))} characters") from error
            return "refused"
        return "read"

    return read


def planted_target(folder: Path) -> Target:
    """A fault that a campaign must find: it shows that what a campaign finds is told."""

    def divide(data: bytes) -> str:
        return str(1 // (Choices(data).number(7) - 3))

    return divide


TARGETS: dict[str, Callable[[Path], Target]] = {
    "decode": decode_target,
    "yaml": yaml_target,
    "site": site_target,
}


def campaign(name: str, runs: int) -> dict[str, Any]:
    """One campaign in a process of its own: inputs, outcomes, seconds, growth.

    Raises Failure with the input that ended as none may, and what it said.
    """
    with tempfile.TemporaryDirectory(prefix="perennial-fuzz-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.redteam.fuzz", name, str(runs), str(report)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, check=False
        )
        if done.returncode or not report.exists():
            raise Failure(f"{name}: ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return json.loads(report.read_text())


def _inside(name: str, runs: int, report: Path) -> None:
    """The campaign itself."""
    import logging

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES * 2**30, resource.RLIM_INFINITY))
    folder = report.parent / "work"
    folder.mkdir()
    made = {**TARGETS, "planted": planted_target}[name]
    target = made(folder)
    outcomes: Counter[str] = Counter()
    start, resident = time.monotonic(), [0]

    def one(data: bytes) -> None:
        signal.alarm(SECONDS_FOR_ONE)
        try:
            outcomes[target(data)] += 1
        except Exception as error:
            raise Failure(f"input {data.hex()}: {type(error).__name__}: {error}") from error
        finally:
            signal.alarm(0)
        if outcomes.total() == max(1, runs // 10):
            resident[0] = _resident()

    def close() -> None:
        grown = _resident() - resident[0]
        found = {
            "target": name,
            "inputs": outcomes.total(),
            "outcomes": dict(sorted(outcomes.items())),
            "seconds": round(time.monotonic() - start, 1),
            "processor_seconds": round(time.process_time(), 1),
            "grown_bytes": grown,
            "disk_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        }
        report.write_text(json.dumps(found))

    _with_hypothesis(one, runs)
    close()


def _with_hypothesis(one: Callable[[bytes], None], runs: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    # seeds of whole inputs: making bytes one by one would cost more than what is done with them
    data = st.integers(0, 2**64 - 1).map(random_bytes)
    tried = settings(
        max_examples=runs,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )
    tried(given(data=data)(one))()


def random_bytes(seed: int) -> bytes:
    """An input: short ones change little of a message, so that it reaches what is behind the checks."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.bytes(int(LONGEST_INPUT * rng.random() ** 3))


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _inside(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
