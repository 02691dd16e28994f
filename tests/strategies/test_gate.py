"""What is wrong with a reply is named, and the reply never reaches the model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Message

from perennial.engine.grid import set_task_identity
from perennial.protocol.messages import Refusal, TrainReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Gate, Refused, Rejected

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=4, num_classes=2)
REFERENCE = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
GOOD = TrainReply(
    **STAMP.stamp_fields, update=Tensors(w=torch.ones(2, 3), b=torch.ones(2)), num_examples=5, train_loss=0.5
)


def message(content: Any) -> Message:
    set_task_identity()
    return Message(content.to_record(), dst_node_id=1, message_type="train")


def test_a_good_reply_passes_with_its_norm() -> None:
    admitted = Gate(REFERENCE, STAMP).admit(message(GOOD), "a")
    assert admitted.norm == pytest.approx(8**0.5)
    assert admitted.num_examples == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"update": Tensors(w=torch.full((2, 3), torch.nan), b=torch.ones(2))}, "'w'.*NaN"),
        ({"update": Tensors(w=torch.full((2, 3), -torch.inf), b=torch.ones(2))}, "'w'.*infinite"),
        (
            {"update": Tensors(w=torch.ones(2, 1), b=torch.ones(2))},
            r"'w': found .*\(2, 1\), expected .*\(2, 3\)",
        ),
        ({"update": Tensors(w=torch.ones(2, 3, dtype=torch.int64), b=torch.ones(2))}, "int64"),
        ({"update": Tensors(w=torch.ones(2, 3))}, r"missing \['b'\]"),
        ({"update": Tensors(w=torch.ones(2, 3), b=torch.ones(2), c=torch.ones(1))}, r"unexpected \['c'\]"),
        ({"task": 2}, "task: found 2, expected 1"),
        ({"round": 3}, "round: found 3, expected 4"),
        ({"class_order": "d" * 64}, "class_order"),
        ({"run": "1" * 16}, "run: found"),
        ({"metrics": "[" * 100_000}, "metrics: not JSON that can be read: nested too deeply"),
    ],
)
def test_a_bad_reply_is_rejected_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        Gate(REFERENCE, STAMP).admit(message(replace(GOOD, **change)), "a")


@pytest.mark.parametrize("value", [0, True, 1.5, 10**12])
def test_sample_counts_are_integers_in_range(value: Any) -> None:
    reply = message(GOOD)
    reply.content.config_records["fields"]["num_examples"] = value
    with pytest.raises(Rejected, match="num_examples"):
        Gate(REFERENCE, STAMP).admit(reply, "a")


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ("[" * 100_000, "metrics: not JSON that can be read: nested too deeply"),
        ("[1]", r"metrics: found \[1\], allowed a JSON object"),
        ("{", "metrics: not JSON: Expecting property name"),
        ('{"share": ' + "9" * 5000 + "}", "metrics: not JSON: .*4300 digits"),
    ],
)
def test_metrics_that_cannot_be_read_are_rejected(metrics: str, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        Gate(REFERENCE, STAMP).admit(message(replace(GOOD, metrics=metrics)), "a")


def test_a_second_reply_a_refusal_and_a_large_update() -> None:
    gate = Gate(REFERENCE, STAMP)
    gate.admit(message(GOOD), "a")
    with pytest.raises(Rejected, match="second reply"):
        gate.admit(message(GOOD), "a")
    with pytest.raises(Refused, match="policy: no"):
        gate.admit(message(Refusal(site="b", kind="policy", reason="no")), "b")
    with pytest.raises(Rejected, match="above max_update_norm"):
        Gate(REFERENCE, STAMP, max_update_norm=1.0).admit(message(GOOD), "a")
