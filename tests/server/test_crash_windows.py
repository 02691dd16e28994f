"""kill -9 of a running federation around the moment in which a release leaves: no ledger under-counts."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.privacy.accountants import make_accountant
from perennial.privacy.ledger import Ledger
from tests.forks import run_code

ROOT = Path(__file__).resolve().parents[2]
SITES, ROUNDS, KILLED_AT = 3, 2, 5
"""The fifth reply is that of the second site in the second round."""
EXPERIMENT: dict[str, Any] = {
    "name": "crash",
    "seed": 3,
    "data": {"source": "digits", "sites": SITES, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": ROUNDS},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {
        "preset": "none",
        "epochs": 1,
        "batch_size": 16,
        "optimizer": {"lr": 0.1},
        "classification": "ce",
    },
    "privacy": {"mode": "client_local", "clip_norm": 0.5, "noise_multiplier": 4.0},
    "evaluation": {"federated": False},
}
KILLED = """
import os, sys
from perennial.client import training_turn
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.strategies.round.gate import Gate

experiment, runs, window, at = sys.argv[1:]
seen = {"site": 0, "server": 0}

def at_last(where):
    seen[where] += 1
    if window == where and seen[where] == int(at):
        os.kill(os.getpid(), 9)

leave, admit = training_turn.leave, Gate.admit

def charged(identity, *request, **typed):
    reply = leave(identity, *request, **typed)
    at_last("site")
    print(identity.name, flush=True)
    return reply

def admitted(gate, *message):
    at_last("server")
    return admit(gate, *message)

training_turn.leave, Gate.admit = charged, admitted
run_in_process(RunSettings(experiment, runs=runs))
"""


@pytest.mark.slow
@pytest.mark.parametrize("window", ["site", "server"], ids=["charge and send", "send and acknowledgement"])
def test_a_kill_between(window: str, tmp_path: Path) -> None:
    """site: charged, and the reply has not left. server: the reply is there, and nobody has taken note."""
    path, runs = tmp_path / "experiment.yaml", tmp_path / "runs"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    killed = run_code(KILLED, str(path), str(runs), window, str(KILLED_AT))
    assert killed.returncode == -signal.SIGKILL
    names = [f"site-{number}" for number in range(SITES)]
    left = {name: killed.stdout.split().count(name) for name in names}
    assert sum(left.values()) >= KILLED_AT - 1
    charged = _charged(runs, names)
    assert all(charged[name] >= left[name] for name in names)
    if window == "site":
        # one release was charged and never left
        assert sum(charged.values()) == sum(left.values()) + 1
    summary: dict[str, Any] = run_in_process(RunSettings(str(path), runs=str(runs), resume="yes"))
    after = _charged(runs, names)
    # a release that was charged and did not get as far as to be kept is the only one paid for again
    assert sum(after.values()) == SITES * ROUNDS + (window == "site")
    assert max(after.values()) == ROUNDS + (window == "site")
    most = ROUNDS
    expected = make_accountant("prv", [(2.0, 1.0, most)]).epsilon(1e-5)
    assert summary["epsilon"]["value"] >= expected * (1 - 1e-9)


def _charged(runs: Path, names: list[str]) -> dict[str, int]:
    return {name: len(Ledger(runs / "crash" / "sites" / name).entries()) for name in names}
