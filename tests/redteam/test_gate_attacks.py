"""A site that wants the model, the server or its operator's terminal: replies against the real gate.

Each attack ends in a rule that is named, or counts as nothing.
"""

import json
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from perennial.baselines.feddisco import FedDisco
from perennial.config.rounds import BoundsConfig
from perennial.engine.grid import set_task_identity
from perennial.foundation.errors import ProtocolError
from perennial.protocol.fields import WireMessage
from perennial.protocol.measurements import HELD_OUT_ACCURACY, LABEL_COUNTS
from perennial.protocol.messages import Refusal, TrainReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.multi_factor import MultiFactor
from perennial.strategies.round.gate import Admitted, Gate, Refused, Rejected, RunningBounds
from tests.rounds import begun

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=2, round=7, num_classes=2)
REFERENCE = {"w": torch.full((2, 3), 0.25), "b": torch.zeros(2)}
GOOD = TrainReply(
    **STAMP.stamp_fields, update=Tensors(w=torch.ones(2, 3), b=torch.ones(2)), num_examples=5, train_loss=0.5
)
LONGEST_REASON = 1_100


def sent(content: WireMessage | RecordDict) -> Message:
    set_task_identity()
    record = content if isinstance(content, RecordDict) else content.to_record()
    return Message(record, dst_node_id=1, message_type="train")


def gate(**settings: Any) -> Gate:
    return Gate(REFERENCE, STAMP, **settings)


def with_array(array: Array, name: str = "w") -> Message:
    """A good reply with one array as a stranger's bytes."""
    record = GOOD.to_record()
    arrays = ArrayRecord({key: Array(tensor.numpy()) for key, tensor in GOOD.update.items()})
    arrays[name] = array
    record["update"] = arrays
    return sent(record)


def rejected(message: Message, **settings: Any) -> str:
    with pytest.raises((Rejected, Refused)) as found:
        gate(**settings).admit(message, "a")
    reason = str(found.value)
    assert len(reason) < LONGEST_REASON and reason.isprintable(), "a journal and a terminal take it"
    return reason


# values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_one_value_that_is_no_number(value: float, place: int) -> None:
    tensor = torch.ones(2, 3)
    tensor.view(-1)[place] = value
    update = Tensors(w=tensor, b=torch.ones(2))
    assert "'w'" in rejected(sent(replace(GOOD, update=update)))
    assert "'w'" in rejected(with_array(Array(tensor.numpy())))


def test_nan_as_the_bits_of_an_integer_or_under_another_name() -> None:
    bits = torch.full((2, 3), math.nan).view(torch.int32)
    assert "int32" in rejected(sent(replace(GOOD, update=Tensors(w=bits, b=torch.ones(2)))))
    # the same bits, called float32 by whoever sends them
    lying = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=Array(bits.numpy()).data)
    assert "'w'" in rejected(with_array(lying)) or "int32" in rejected(with_array(lying))


def test_an_integer_buffer_cannot_carry_anything_into_the_model() -> None:
    buffers = {"steps": torch.tensor([2**62])}
    assert "unexpected ['steps']" in rejected(
        sent(replace(GOOD, update=Tensors(**dict(GOOD.update), **buffers)))
    )
    # under Flower's own start(), where a whole model travels, the server keeps its own buffers
    record = RecordDict(
        {
            "arrays": ArrayRecord({k: Array(v.numpy()) for k, v in {**GOOD.update, **buffers}.items()}),
            "metrics": MetricRecord({"num-examples": 3}),
        }
    )
    assert set(Gate(REFERENCE, None).admit(sent(record), "a").update) == {"w", "b"}


@pytest.mark.parametrize("value", [-0.0, 1e-45, -1e-45, 1.1754942e-38])
def test_minus_zero_and_denormals_count_as_nothing(value: float) -> None:
    update = Tensors(w=torch.full((2, 3), value), b=torch.full((2,), value))
    found = gate().admit(sent(replace(GOOD, update=update)), "a")
    assert found.norm < 1e-30
    round_ = begun(FedAvg(), {name: tensor.clone() for name, tensor in REFERENCE.items()})
    round_.add(found)
    after = round_.result()
    assert all(torch.equal(after[name], tensor) for name, tensor in REFERENCE.items())


def test_a_norm_that_overflows_has_a_name() -> None:
    update = Tensors(w=torch.full((2, 3), 3e38), b=torch.ones(2))
    assert "overflowing values" in rejected(sent(replace(GOOD, update=update)))


# shapes and types


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 3, 1), (0, 3), (2, 1), (1, 3), ()])
def test_another_shape_of_as_many_or_of_broadcastable_values(shape: tuple[int, ...]) -> None:
    update = Tensors(w=torch.ones(shape), b=torch.ones(2))
    assert "tensor 'w': found" in rejected(sent(replace(GOOD, update=update)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_another_type(dtype: torch.dtype) -> None:
    update = Tensors(w=torch.ones(2, 3, dtype=dtype), b=torch.ones(2))
    try:
        message = sent(replace(GOOD, update=update))
        message.content["update"].to_numpy_ndarrays()  # pyright: ignore[reportAttributeAccessIssue]
    except TypeError:
        return  # Flower has no such type on the wire
    assert str(dtype).removeprefix("torch.") in rejected(message)


@pytest.mark.parametrize(
    "array",
    [
        Array(dtype="float32", shape=(2**31, 2**31), stype="numpy.ndarray", data=b""),
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=b"\x93NUMPY"),
        Array(dtype="object", shape=(2, 3), stype="numpy.ndarray", data=b"\x80\x04K\x01."),
        Array(dtype="float32", shape=(2, 3), stype="pickle", data=b"cos\nsystem\n"),
        Array(dtype="float32", shape=(-2, -3), stype="numpy.ndarray", data=Array(np.ones((2, 3))).data),
        Array(np.ones((2, 3), dtype=">f4")),
        Array(np.asfortranarray(np.ones((2, 3), dtype=np.float32))),
    ],
    ids=["huge", "cut", "object", "pickle", "negative", "other bytes", "other order"],
)
def test_an_array_whose_label_lies(array: Array) -> None:
    try:
        admitted = gate().admit(with_array(array), "a")
    except Rejected as error:
        assert "w" in str(error) and len(str(error)) < LONGEST_REASON
    else:
        assert torch.equal(admitted.update["w"], torch.ones(2, 3)), "the values that its bytes say"


def test_a_tensor_that_repeats_itself_is_as_large_as_it_says() -> None:
    update = Tensors(w=torch.tensor([[7.0]]).expand(2, 3), b=torch.ones(2))
    assert gate().admit(sent(replace(GOOD, update=update)), "a").norm == pytest.approx((6 * 49 + 2) ** 0.5)


# who, when, how many


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"run": "1" * 16}, "stale or foreign reply: run"),
        ({"experiment": "f" * 64}, "stale or foreign reply: experiment"),
        ({"split_key": "a" * 64}, "stale or foreign reply: split_key"),
        ({"round": 8}, "stale or foreign reply: round: found 8"),
        ({"round": 4}, "stale or foreign reply: round: found 4"),
        ({"task": 1, "round": 6}, "stale or foreign reply: task"),
        ({"num_classes": 3}, "stale or foreign reply: num_classes"),
    ],
    ids=str,
)
def test_a_reply_of_another_time_or_run(change: dict[str, Any], rule: str) -> None:
    """A replay of an earlier run, an update on an older model, one from the future."""
    assert rule in rejected(sent(replace(GOOD, **change)), staleness=2)


def test_a_late_reply_within_the_staleness_says_which_model_it_is_of() -> None:
    assert gate(staleness=2).admit(sent(replace(GOOD, round=5)), "a").base_round == 5


def test_the_same_reply_twice_and_a_second_try_after_a_rejection() -> None:
    door = gate(max_update_norm=10.0)
    large = replace(GOOD, update=Tensors(w=torch.full((2, 3), 99.0), b=torch.ones(2)))
    with pytest.raises(Rejected, match="above max_update_norm"):
        door.admit(sent(large), "a")
    door.admit(sent(GOOD), "a")
    for _ in range(2):
        with pytest.raises(Rejected, match="a second reply in the same round"):
            door.admit(sent(GOOD), "a")


@pytest.mark.parametrize("claim", [0, -1, 10**8 + 1, 2**63 - 1, True, 1.5, "9"])
def test_claims_of_samples_that_cannot_be(claim: Any) -> None:
    record = GOOD.to_record()
    record.config_records["fields"]["num_examples"] = claim
    assert "num_examples" in rejected(sent(record))


def test_the_largest_claim_counts_as_the_bound_and_is_named() -> None:
    found = gate(max_samples=1_000).admit(sent(replace(GOOD, num_examples=10**8)), "a")
    assert found.num_examples == 1_000 and "max_samples" in found.notes[0]


def test_a_norm_just_below_the_bound_never_raises_the_bound() -> None:
    """A minority of 2 in 5 that grows by half each round: its bound stays at three honest norms."""
    bounds = RunningBounds(BoundsConfig(norm_multiple=3), {})
    honest = [Admitted(f"h{k}", {"w": torch.tensor([1.0])}, 1.0, 10) for k in range(3)]
    bounds.round_done([*honest, Admitted("x", {}, 1.0, 10), Admitted("y", {}, 1.0, 10)])
    length = 2.99
    for _ in range(30):
        pair = [Admitted(site, {"w": torch.tensor([length])}, length, 10) for site in "xy"]
        counted = [bounds.bound_reply(reply, scalable=True) for reply in pair]
        assert max(reply.norm for reply in counted) <= 3.0 + 1e-9
        assert all(reply.notes for reply in counted) == (length > 3.0)
        if length > 3.0:
            assert "bounds.norm_multiple" in counted[0].notes[0]
        bounds.round_done([*honest, *counted])
        length *= 1.5


# words


def test_a_reason_of_megabytes_with_escape_sequences() -> None:
    shout = "\x1b[2J\x1b]0;owned\x07" + "x" * 10**6
    with pytest.raises(ProtocolError, match="'reason'"):
        Refusal(site="a", kind="policy", reason=shout).to_record()
    record = Refusal(site="a", kind="policy", reason="no").to_record()
    record.config_records["fields"]["reason"] = shout
    assert "field 'reason'" in rejected(sent(record))
    record.config_records["fields"]["reason"] = shout[:3_000]
    assert "owned" in rejected(sent(record))
    error = Message(Error(2, shout), reply_to=sent(GOOD))
    assert "error at the site or on the way" in rejected(error)


@pytest.mark.parametrize("name", ["\x1b[31m", "a" * 10**6, "../../etc", "w\0", ""])
def test_tensor_and_field_names_that_are_long_or_no_words(name: str) -> None:
    record = GOOD.to_record()
    arrays = ArrayRecord({key: Array(tensor.numpy()) for key, tensor in GOOD.update.items()})
    arrays[name] = Array(np.ones(1, dtype=np.float32))
    record["update"] = arrays
    assert "unexpected" in rejected(sent(record))
    record = GOOD.to_record()
    record.config_records["fields"][name] = 1
    assert "unknown field" in rejected(sent(record))
    record = GOOD.to_record()
    record[f"other{name}"] = ConfigRecord()
    assert "unknown field" in rejected(sent(record))


@pytest.mark.parametrize(
    "metrics",
    ["[" * 10**6, "{" + '"a":' * 50_000, '"text"', "null", "[]", "\0", '{"n": ' + "9" * 5_000 + "}"],
    ids=lambda text: text[:6],
)
def test_metrics_that_are_no_object_of_numbers(metrics: str) -> None:
    reason = rejected(sent(replace(GOOD, metrics=metrics)))
    assert "metrics: not JSON" in reason or re.search("metrics: found .*, allowed a JSON object", reason)


def test_metrics_beyond_any_use_are_refused_by_their_length() -> None:
    record = GOOD.to_record()
    record.config_records["fields"]["metrics"] = json.dumps({"x" * 2**24: 1})
    assert "field 'metrics'" in rejected(sent(record))


@pytest.mark.parametrize("strategy", [partial(MultiFactor, gamma=0.1), FedDisco])
@pytest.mark.parametrize(
    "lie",
    [math.nan, math.inf, -1, 10**400, 1e308, "9", None, [1], [10**400, 1], [math.nan, 1], {"a": 1}, True],
    ids=lambda lie: repr(lie)[:12],
)
def test_figures_that_a_strategy_weighs_by(strategy: Any, lie: Any) -> None:
    """What is asked for and cannot be true is named, and no other exception leaves the strategy."""
    name = LABEL_COUNTS if strategy is FedDisco else HELD_OUT_ACCURACY
    metrics = json.dumps({name: lie, "__proto__": 1, "x" * 1000: lie})
    found = gate().admit(sent(replace(GOOD, metrics=metrics)), "a")
    round_ = begun(strategy(), REFERENCE)
    try:
        round_.add(found)
        after = round_.result()
    except Rejected as error:
        assert len(str(error)) < LONGEST_REASON and (name in str(error) or "label" in str(error))
    else:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_loss", math.nan),
        ("train_loss", "0.1"),
        ("steps", -1),
        ("steps", 1.0),
        ("metrics", 5),
        ("run", "0" * 15),
    ],
)
def test_every_other_field_is_named(field: str, value: Any) -> None:
    record = GOOD.to_record()
    record.config_records["fields"][field] = value
    assert f"field '{field}'" in rejected(sent(record))
