"""The head's rows by class counts: by hand, in any order, with the base's bounds, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, RecordDict

from perennial.baselines.feddisco import FedDisco
from perennial.client.app import app as client_app
from perennial.config.bounds import BoundsConfig
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, site_contexts
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve
from perennial.server.summary import hashes_of
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.class_weighted_head import ClassWeightedHead, class_samples
from perennial.strategies.factory import build_strategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.multi_factor import MultiFactor
from perennial.strategies.round.context import Aggregator
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import TaskStart
from tests import rounds

REFERENCE = {
    "backbone.weight": torch.tensor([1.0, 2.0]),
    "head.weight": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
    "head.bias": torch.tensor([0.5, 0.5, 0.5]),
}
COUNTS = {"a": [30, 10, 0], "b": [0, 20, 0], "c": [7, 3, 0]}
"""Samples of three classes; nobody holds the last one."""
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 2,
    "data": {
        "source": "digits",
        "sites": 3,
        "samples_limit": 240,
        "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 10},
    },
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 2}},
    "strategy": {"name": "class_weighted_head", "base": {"name": "multi_factor"}},
}


def update_of(site: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(ord(site))
    return {name: torch.randn(tensor.shape, generator=draw) for name, tensor in REFERENCE.items()}


def reply_of(site: str, counts: Any = None, samples: int | None = None) -> Admitted:
    update = Tensors(update_of(site))
    counts = COUNTS[site] if counts is None else counts
    told = sum(COUNTS[site]) if samples is None else samples
    return Admitted(site, update, update.norm, told, metrics={"label_counts": counts})


def begun(base: IncrementalStrategy | None = None) -> Aggregator:
    return rounds.begun(ClassWeightedHead(base or FedAvg()), REFERENCE)


def after(round_: Aggregator, order: str = "abc") -> dict[str, torch.Tensor]:
    for site in order:
        round_.add(reply_of(site))
    return round_.result()


def by_base(base: IncrementalStrategy) -> dict[str, torch.Tensor]:
    return after(rounds.begun(base, REFERENCE))


# what a round comes to


def test_each_row_is_the_mean_by_samples_of_its_class() -> None:
    found, plain = after(begun()), by_base(FedAvg())
    assert torch.equal(found["backbone.weight"], plain["backbone.weight"])
    for name in ("head.weight", "head.bias"):
        of = {site: update_of(site)[name] for site in "abc"}
        first = REFERENCE[name][0] + (30 * of["a"][0] + 7 * of["c"][0]) / 37
        second = REFERENCE[name][1] + (10 * of["a"][1] + 20 * of["b"][1] + 3 * of["c"][1]) / 33
        torch.testing.assert_close(found[name][0], first)
        torch.testing.assert_close(found[name][1], second)
        # of a class that nobody holds the base decides
        assert torch.equal(found[name][2], plain[name][2])
        assert not torch.equal(found[name][0], plain[name][0])


def test_where_one_site_holds_a_class_its_row_is_that_sites() -> None:
    strategy = begun()
    strategy.add(reply_of("a", [0, 40, 0]))
    strategy.add(reply_of("b", [20, 0, 0]))
    found = strategy.result()
    for row, site in ((0, "b"), (1, "a")):
        expected = REFERENCE["head.weight"][row] + update_of(site)["head.weight"][row]
        torch.testing.assert_close(found["head.weight"][row], expected)
    assert strategy.ctx.outcome.details["class_samples"] == [20, 40, 0]


def test_equal_counts_are_fedavg() -> None:
    strategy, plain = begun(), rounds.begun(FedAvg(), REFERENCE)
    for site, samples in (("a", 6), ("b", 12)):
        reply = reply_of(site, [samples // 3] * 3, samples)
        strategy.add(reply)
        plain.add(reply)
    expected = plain.result()
    for name, tensor in strategy.result().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", [FedAvg, MultiFactor, FedDisco])
def test_the_order_of_arrival_changes_no_bit(base: type[IncrementalStrategy]) -> None:
    results = [after(begun(base()), "".join(order)) for order in itertools.permutations("abc")]
    for found in results[1:]:
        assert all(torch.equal(found[name], tensor) for name, tensor in results[0].items())


def test_counts_add_up_to_no_more_than_the_samples_that_count() -> None:
    assert class_samples([30, 10, 0], 40, 3) == [30, 10, 0]
    assert class_samples([30, 10, 0], 20, 3) == [15, 5, 0]
    assert class_samples([30, None, None], 40, 3) == [30, 5, 5]
    assert class_samples([3, 1, 0], 40, 3) == [3, 1, 0], "a site may say that it holds fewer"
    with pytest.raises(Rejected, match="label_counts: found 2 classes, allowed 3"):
        class_samples([30, 10], 40, 3)
    with pytest.raises(Rejected, match="label_counts"):
        class_samples([0, 0, 0], 40, 3)


def test_a_reply_is_in_both_sums_or_in_none() -> None:
    strategy = begun()
    for broken in (reply_of("a", [30, 10]), reply_of("a", "many")):
        with pytest.raises(Rejected, match="label_counts"):
            strategy.add(broken)

    class Refusing(FedAvg):
        def weight(self, reply: Admitted) -> float:
            if reply.site == "a":
                raise Rejected("not this one")
            return super().weight(reply)

    refusing = begun(Refusing())
    with pytest.raises(Rejected, match="not this one"):
        refusing.add(reply_of("a"))
    for subject in (strategy, refusing):
        subject.add(reply_of("b"))
        row = REFERENCE["head.weight"][1] + update_of("b")["head.weight"][1]
        torch.testing.assert_close(subject.result()["head.weight"][1], row)


def test_an_update_that_the_sum_cannot_hold_is_dropped() -> None:
    strategy = rounds.begun(ClassWeightedHead(FedAvg()), REFERENCE, bounds=BoundsConfig(max_samples=4))
    with pytest.raises(Rejected, match="does not fit"):
        update = Tensors({name: tensor * 1e12 for name, tensor in update_of("a").items()})
        strategy.add(Admitted("a", update, update.norm, 4, metrics={"label_counts": [4, 0, 0]}))


# whole runs


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    experiment = write(tmp_path)
    whole = run_in_process(RunSettings(experiment, runs=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        run_in_process(RunSettings(experiment, runs=str(tmp_path / "stopped")), listener=stop)
    resumed = run_in_process(RunSettings(experiment, runs=str(tmp_path / "stopped"), resume="yes"))
    assert hashes_of(whole) == hashes_of(resumed)
    plain = write(tmp_path, strategy={"name": "multi_factor"})
    assert hashes_of(run_in_process(RunSettings(plain, runs=str(tmp_path / "plain")))) != hashes_of(whole)


def test_sites_tell_their_counts_and_the_bounds_hold(tmp_path: Path) -> None:
    """A claim of many samples is capped as under the base, and with it the site's counts."""
    path = write(tmp_path, bounds={"max_samples": 30}, tasks={"count": 1, "rounds": 1})
    settings = RunSettings(path, runs=str(tmp_path / "runs"))
    run_config = dict(vars(settings))
    grid = InProcessGrid(client_app, site_contexts(3, run_config))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    serve(grid, context, "in-process")
    lines = (tmp_path / "runs" / "small" / "events.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert len(event["participants"]) == 3
    assert len(event["details"]["weights"]) == 3, "what the base notes stays in the journal"
    assert 0 < sum(event["details"]["class_samples"]) <= 3 * 30 + 10


def test_requests_ask_for_what_the_base_asks_and_for_counts() -> None:
    stamp: dict[str, Any] = {"run": "ab" * 8, "experiment": "cd" * 32, "class_order": "ef" * 32}
    request = TrainRequest(**stamp, task=1, round=1, num_classes=3, arrays=Tensors(REFERENCE))
    (found,) = set(
        each.settings for each in ClassWeightedHead(MultiFactor()).requests(request, ["a", "b"]).values()
    )
    assert set(json.loads(found)["tell"]) == {"label_counts", "held_out_accuracy", "classification_loss"}


# what is refused


@pytest.mark.parametrize(
    ("base", "keys", "reason"),
    [
        ("serial_ring", {}, "rounds of its own kind"),
        ("analytic", {}, "rounds of its own kind"),
        ("digest_synthesis", {"base": "fedavg"}, "rounds of its own kind"),
        ("glfc", {}, "one of several models"),
        ("scaffold", {}, "remember the whole"),
        ("feddyn", {}, "remember the whole"),
        ("median", {}, "compares whole updates"),
    ],
)
def test_a_base_that_does_not_fold_plain_updates_is_refused(
    base: str, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*allowed"):
        build_strategy("class_weighted_head", {"base": {"name": base, **keys}})


def test_under_privacy_and_secure_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    noise = {"clip_norm": 1.0, "noise_multiplier": 1.0, "noise_source": "seeded"}
    strategy = {"name": "class_weighted_head", "base": "fedavg"}
    private = {"privacy": {"mode": "client_local", **noise}, "evaluation": {"federated": False}}
    local = write(tmp_path, strategy=strategy, **private)
    with pytest.raises(PrivacyError, match="label_counts"):
        run_in_process(RunSettings(local, runs=str(tmp_path / "runs")))
    with pytest.raises(ConfigError, match="class_weighted_head.*class counts"):
        load_experiment(Path(write(tmp_path, strategy=strategy, secure={})))


def test_a_head_that_does_not_travel_is_refused() -> None:
    strategy = ClassWeightedHead(FedAvg())
    shared = {"backbone.weight": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"head\.weight, head\.bias is not among"):
        strategy.begin_task(TaskStart(1, 3, range(3), shared, ("a",)))
    strategy.begin_task(TaskStart(1, 3, range(3), REFERENCE, ("a",)))
