"""Fuzz what a stranger can send: messages and files. Nothing may crash, hang, grow, or end in the catch-all.

Each target takes the bytes of a seed, and turns them into a message or a file.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.redteam.fuzz_inputs import Choices, changed_record, changed_yaml

RUNS = {"decode": 92_000, "yaml": 5_000, "site": 3_000}
"""Inputs of each target in the slow stage of the tests: 100,000 together."""
LONGEST_INPUT = 600
"""Bytes, which decide on a few hundred changes."""
SECONDS_FOR_ONE = 60
STATE_LIMITS = {"runs": 5, "gigabytes": 0.05}
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


TARGETS: dict[str, Callable[[Path], Target]] = {
    "decode": decode_target,
    "yaml": yaml_target,
    "site": site_target,
}


def campaign(target: Target, inputs: int, first: int = 0) -> tuple[Counter[str], int]:
    """(how the inputs of so many seeds ended, bytes by which the process grew after the first tenth).

    Raises Failure with the input that ended as none may.
    """
    outcomes, resident = Counter[str](), 0
    for seed in range(first, first + inputs):
        data = random_bytes(seed)
        signal.alarm(SECONDS_FOR_ONE)
        try:
            outcomes[target(data)] += 1
        except Exception as error:
            raise Failure(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            signal.alarm(0)
        if outcomes.total() == max(1, inputs // 10):
            resident = _resident()
    return outcomes, _resident() - resident


def random_bytes(seed: int) -> bytes:
    """An input: short ones change little of a message, so that it reaches what is behind the checks."""
    rng = np.random.default_rng(seed)
    return rng.bytes(int(LONGEST_INPUT * rng.random() ** 3))


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
