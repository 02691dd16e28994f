"""What a command and a message may import: a site starts a process for each message, so imports are time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.approved import approve_installed

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("opacus", "ray", "scipy", "sklearn.datasets", "sympy", "torch._dynamo", "torchvision")
MESSAGE = """
import sys
from flwr.app import Context, Message, RecordDict
from perennial.engine.grid import set_task_identity
set_task_identity()
config = {"digest": sys.argv[4], "runs": sys.argv[2], "device": "cpu"}
context = Context(1, 1, {"site": sys.argv[3]}, RecordDict(), config)
"""
DESCRIBE = """
from perennial.protocol.messages import DescribeRequest
from perennial.protocol.stamp import VERSION
from perennial.client.app import app
request = DescribeRequest(version=VERSION, experiment="e" * 64).to_record()
"""
TRAIN = """
import torch
from perennial.config.experiment import load_experiment
from perennial.config.simulation import load_simulated_federation
from perennial.models.incremental import select_travelling
from perennial.models.factory import build_model
from pathlib import Path
from perennial.protocol.tensors import Tensors
from perennial.protocol.messages import TrainRequest
from perennial.client.app import app
experiment = load_experiment(Path(sys.argv[1]))
registry = load_simulated_federation(experiment).registry
arrays = select_travelling(build_model(experiment.model, (1, 8, 8), registry.schedule.num_classes(1), 1))
request = TrainRequest(
    run="0" * 16, experiment=experiment.digest, class_order=registry.order_hash, task=1, round=1,
    num_classes=registry.schedule.num_classes(1), arrays=Tensors(arrays), previous="",
).to_record()
"""


def modules_after(code: str, *arguments: str) -> set[str]:
    """Names of all modules that a fresh process has imported at the end of code."""
    end = "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + end, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


def command(*arguments: str) -> set[str]:
    code = (
        f"import sys; sys.argv = {['perennial', *arguments]!r}\n"
        "from perennial.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code"
    )
    return modules_after(code)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"]])
def test_help_imports_neither_torch_nor_flower(arguments: list[str]) -> None:
    assert not command(*arguments) & {"torch", "numpy", "flwr", "pydantic", "yaml", *HEAVY}


def test_check_imports_no_library_that_the_experiment_does_not_use() -> None:
    imported = command("check", "experiments/quickstart.yaml")
    assert "torch" in imported
    assert not imported & set(HEAVY)


@pytest.mark.parametrize("strategy", ["fedavgg", "{name: digest_synthesis, base: fedavgg}"])
def test_a_wrong_strategy_is_refused_before_torch_is_there(strategy: str) -> None:
    imported = modules_after(
        "from perennial.config.experiment import load_experiment\n"
        "from perennial.foundation.errors import ConfigError\n"
        f"try: load_experiment('experiments/quickstart.yaml', ['strategy={strategy}'])\n"
        "except ConfigError as error: assert \"name: found 'fedavgg'\" in str(error), error\n"
        "else: raise AssertionError"
    )
    assert "torch" not in imported


def test_saying_who_it_is_costs_a_site_no_torch(tmp_path: Path) -> None:
    imported = answered(DESCRIBE, tmp_path)
    assert not imported & {"torch", *HEAVY}


def test_training_imports_torch_and_nothing_else_that_is_heavy(tmp_path: Path) -> None:
    imported = answered(TRAIN, tmp_path)
    assert "torch" in imported
    assert not imported & set(HEAVY)


def answered(request: str, runs: Path) -> set[str]:
    """Modules of a real site's ClientApp process that has answered one request."""
    kind = "train" if request is TRAIN else "query.describe"
    code = MESSAGE + request + f"reply = app(Message(request, 1, {kind!r}), context)\n"
    code += "assert reply.content.config_records['fields']['message'] != 'Refusal', reply.content"
    site = runs / "site.yaml"
    site.write_text(json.dumps({"site": "site-0", "state_dir": str(runs / "state")}))
    experiment = ROOT / "experiments" / "quickstart.yaml"
    digest = approve_installed(experiment, runs / "approvals").experiment
    return modules_after(code, str(experiment), str(runs), str(site), digest)
