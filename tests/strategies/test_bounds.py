"""Bounds on what a site claims and sends: by the medians of former rounds, in any order, never a stop."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

from benchmarks.dishonest import attacked_run
from perennial.config.rounds import BoundsConfig
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.grid import set_task_identity
from perennial.protocol.messages import TrainReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted, Rejected, RunningBounds
from tests.rounds import context, received

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=1, num_classes=2)


def reply(site: str, norm: float, samples: int = 10) -> Admitted:
    return Admitted(site, {"a": torch.tensor([norm])}, norm, samples)


def begun(norms: list[float], samples: list[int], **config: Any) -> RunningBounds:
    """After one round of such replies, of sites s0, s1, ..."""
    bounds = RunningBounds(BoundsConfig(**{"norm_multiple": 3, **config}), {})
    replies = [reply(f"s{k}", n, m) for k, (n, m) in enumerate(zip(norms, samples, strict=True))]
    bounds.see_all(replies)
    bounds.round_done([bounds.bound_reply(each, True) for each in replies])
    return bounds


def test_an_update_above_three_medians_is_scaled_and_named() -> None:
    bounds = begun([1.0, 2.0, 50.0], [10, 10, 10])
    long = bounds.bound_reply(reply("x", 12.0), scalable=True)
    assert long.norm == 6.0 and float(long.update["a"]) == pytest.approx(6.0)
    assert "norm 12 is above 6" in long.notes[0] and "scaled down" in long.notes[0]
    assert bounds.bound_reply(reply("y", 6.0), scalable=True).notes == ()


def test_dropping_and_methods_that_remember_the_whole_update() -> None:
    with pytest.raises(Rejected, match="bounds.norm_multiple"):
        begun([1.0], [1]).bound_reply(reply("x", 4.0), scalable=False)
    assert begun([1.0], [1], norm_multiple=None).bound_reply(reply("x", 4e9), scalable=True).norm == 4e9


def test_nobody_counts_for_more_than_the_others_together_did_in_the_last_round() -> None:
    bounds = begun([1.0] * 4, [100] * 4, registered={"s3": 5000})
    assert bounds.bound_reply(reply("s0", 1.0, 10**8), True).num_examples == 300
    assert bounds.bound_reply(reply("s0", 1.0, 300), True).notes == ()
    assert bounds.bound_reply(reply("s3", 1.0, 10**8), True).num_examples == 5000
    assert bounds.bound_reply(reply("s3", 1.0, 4000), True).num_examples == 4000
    noted = bounds.bound_reply(reply("s0", 1.0, 10**8), True).notes[0]
    assert noted == "has 100000000 samples, and counts as 300 (bounds.share)"


@pytest.mark.parametrize(
    ("claims", "counts", "share"),
    [
        ([900, 100, 100, 100], [300, 100, 100, 100], None),
        ([900, 100, 100], [900, 100, 100], None),
        ([10**8, 10**8, 100, 100, 100], [300, 300, 100, 100, 100], 1 / 3),
        ([900, 100, 100, 100], [150, 100, 100, 100], 1 / 3),
        ([900, 100, 100, 100], [900, 100, 100, 100], 1),
    ],
)
def test_what_sites_count_as_in_a_first_round(
    claims: list[int], counts: list[int], share: float | None
) -> None:
    bounds = RunningBounds(BoundsConfig(norm_multiple=3, share=share), {})
    replies = [reply(f"s{k}", 1.0, n) for k, n in enumerate(claims)]
    bounds.see_all(replies)
    assert [bounds.bound_reply(each, True).num_examples for each in replies] == counts
    # what was capped counts as capped when the next round's bounds are found
    bounds.round_done([bounds.bound_reply(each, True) for each in replies])
    assert [bounds.bound_reply(each, True).num_examples for each in replies] == counts


def test_the_state_is_a_part_of_the_checkpoint_and_forgets_old_rounds() -> None:
    bounds = begun([5.0], [10])
    latest = [*[1.0] * 9, 2.0]
    for norm in latest:
        bounds.round_done([reply("a", norm)])
    resumed = RunningBounds(BoundsConfig(norm_multiple=3), json.loads(json.dumps(bounds.state)))
    assert resumed.state["norms"] == latest
    assert resumed.bound_reply(reply("x", 9.0), True).norm == 6.0
    assert not resumed.waiting and RunningBounds(BoundsConfig(norm_multiple=3), {}).waiting
    assert not RunningBounds(BoundsConfig(), {}).waiting


def run(
    tmp_path: Path, attack: str = "", name: str = "run", **bounds: Any
) -> tuple[dict[str, Any], list[Any]]:
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / "robust_digits.yaml"),
        overrides=json.dumps(
            [
                "tasks.rounds=2",
                "data.partition.alpha=100",
                f"bounds={json.dumps({'norm_multiple': 3, **bounds})}",
            ]
        ),
        runs=str(tmp_path / name),
        name=name,
        device="cpu",
    )
    summary = attacked_run(settings, attack)
    lines = (tmp_path / name / name / "events.jsonl").read_text().splitlines()
    return summary, [event for event in map(json.loads, lines)]


def test_a_boosted_site_is_bounded_in_the_first_round_already_and_named(tmp_path: Path) -> None:
    _, events = run(tmp_path, "scaling:boost=100,samples=1e8")
    notes = [event["text"] for event in events if event["event"] == "note"]
    for number in (1, 2):
        assert any(f"round {number}: site site-4: update: norm" in note for note in notes)
        assert any(f"round {number}: site site-4: has 100000000 samples" in note for note in notes)
    assert not any("site site-0" in note for note in notes)


def test_an_honest_run_has_the_same_bits_with_and_without_bounds(tmp_path: Path) -> None:
    bounded, _ = run(tmp_path, name="with")
    free, _ = run(tmp_path, name="without", norm_multiple=None, share=1)
    assert bounded["model_sha256"] == free["model_sha256"]


def test_the_order_of_arrival_in_a_first_round_changes_no_bit() -> None:
    set_task_identity()
    reference = {"a": torch.zeros(3)}
    generator = torch.Generator().manual_seed(2)
    updates = [torch.randn(3, generator=generator) * 10**k for k in range(4)]
    found = []
    for order in itertools.permutations(range(4)):
        strategy = FedAvg()
        strategy.exchange.names = {k + 1: f"site-{k}" for k in range(4)}
        replies = []
        for k in order:
            content = TrainReply(
                **STAMP.stamp_fields, update=Tensors(a=updates[k]), num_examples=10 ** (k + 1)
            )
            asked = Message(RecordDict(), k + 1, "train")
            replies.append(Message(content.to_record(), reply_to=asked))
        ctx = context(reference, stamp=STAMP, running=RunningBounds(BoundsConfig(norm_multiple=3), {}))
        arrays, outcome = received(strategy, ctx, replies)
        found.append(arrays["a"])
        assert len(outcome.warnings) == 2
    assert all(torch.equal(each, found[0]) for each in found)
