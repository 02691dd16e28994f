"""Every strategy under Flower's own start() with a ClientApp that knows nothing of Perennial, and a site of
ours under a strategy that is not ours: docs/interop.md says what works, and nothing fails without a word."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts, set_task_identity
from perennial.engine.run import answer
from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import STRATEGIES, build_strategy
from tests.strategies.quickstart_client import Net, load_data
from tests.strategies.quickstart_client import app as quickstart

PAGE = Path(__file__).resolve().parents[2] / "docs" / "interop.md"
KEYS: dict[str, dict[str, Any]] = {
    "clustered_personalisation": {"base": "fedavg", "global_rounds": 1},
    "contribution": {"base": "serial_ring"},
    "digest_synthesis": {"base": "fedavg"},
    "pfa": {"global_rounds": 1, "layer": 1},
}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("multi_factor", "with quality and loss", {"gamma": 0.1, "delta": 0.1}),
]
CASES = [(name, "", KEYS.get(name, {})) for name in sorted(STRATEGIES)] + VARIANTS
SITES = 5


def client(message: Message, context: Context) -> Message:
    return quickstart(message, context)


def started(strategy: FlowerFedAvg, answers: Any = client, rounds: int = 3) -> ArrayRecord:
    set_task_identity()
    torch.manual_seed(1)
    start = ArrayRecord(Net().state_dict())
    grid = InProcessGrid(answers, build_site_contexts(SITES, {}))
    return strategy.start(grid, start, num_rounds=rounds, timeout=30.0).arrays


def accuracy(arrays: ArrayRecord) -> float:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.eval()
    x, y = load_data(99)
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


def verdict(name: str, keys: dict[str, Any]) -> tuple[str, str]:
    """(works or refuses, why): what happens when it is tried, and not what anybody says of it."""
    strategy: IncrementalStrategy = build_strategy(name, keys)
    try:
        arrays = started(strategy)
    except ConfigError as error:
        reason = str(error).partition("needs ")[2]
        for end in (", which Flower's", ", and a reply"):
            reason = reason.partition(end)[0]
        return "refuses", f"needs {reason}"
    assert accuracy(arrays) > 0.8, name
    return "works", ""


@pytest.mark.parametrize(("name", "variant", "keys"), CASES, ids=[f"{n} {v}".strip() for n, v, _ in CASES])
def test_a_strategy_learns_or_says_what_it_needs(name: str, variant: str, keys: dict[str, Any]) -> None:
    found, why = verdict(name, keys)
    label = f"`{name}`{f', {variant}' if variant else ''}"
    row = f"| {label} | {found} | {why} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_lists_every_strategy_and_no_other() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(CASES)


def test_a_first_round_of_which_nothing_can_be_used_stops_with_the_reason() -> None:
    def broken(message: Message, context: Context) -> Message:
        reply = quickstart(message, context)
        reply.content.metric_records["metrics"].pop("num-examples")
        return reply

    with pytest.raises(ConfigError, match=r"none of 5 replies could be used.*node-.*num-examples"):
        started(build_strategy("fedavg", {}), broken)


def test_a_site_of_ours_tells_a_foreign_strategy_why_it_does_not_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_task_identity()
    settings = RunSettings(str(PAGE.parents[1] / "experiments" / "quickstart.yaml"), runs=str(tmp_path))
    grid = InProcessGrid(answer, build_site_contexts(SITES, dict(vars(settings))))
    minima: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        FlowerFedAvg(**minima).start(grid, ArrayRecord(Net().state_dict()), num_rounds=1, timeout=30.0)
    finally:
        logger.removeHandler(caplog.handler)
    assert "this site runs Perennial and answers TrainRequest" in caplog.text
