"""Messages come back as they were sent, and anything else is refused by the name of its field."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord

from perennial.foundation.errors import ProtocolError
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import (
    DescribeReply,
    DigestRequest,
    FinishTaskReply,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors, pack, unpack

STAMP = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 1,
    "round": 2,
    "num_classes": 2,
}


def request() -> TrainRequest:
    return TrainRequest(**STAMP, arrays=Tensors(w=torch.randn(3, 2), n=torch.randn(())))


def through_bytes(record: ArrayRecord) -> ArrayRecord:
    """What a network does: only dtype, shape and bytes survive."""
    copy = ArrayRecord()
    for name, array in record.items():
        copy[name] = Array(array.dtype, tuple(array.shape), array.stype, bytes(array.data))
    return copy


def test_a_message_survives_the_wire_bit_for_bit() -> None:
    sent = request()
    record = sent.to_record()
    record["arrays"] = through_bytes(record.array_records["arrays"])
    received = TrainRequest.from_record(record)
    assert received.stamp_fields == sent.stamp_fields
    assert received.previous_arrays is None
    assert all(torch.equal(received.arrays[name], tensor) for name, tensor in sent.arrays.items())


def test_faults_are_named() -> None:
    record = request().to_record()
    record.config_records["fields"]["taks"] = 1
    with pytest.raises(ProtocolError, match="unknown field 'taks' .did you mean 'task'"):
        TrainRequest.from_record(record)
    for value in (True, "1", 1.5, 0, -3):
        record = request().to_record()
        record.config_records["fields"]["task"] = value
        with pytest.raises(ProtocolError, match="'task'"):
            TrainRequest.from_record(record)
    record = request().to_record()
    del record.config_records["fields"]["run"]
    with pytest.raises(ProtocolError, match="'run' is missing"):
        TrainRequest.from_record(record)
    record = TrainReply(**STAMP, update=Tensors(w=torch.zeros(2)), num_examples=1, train_loss=1.0).to_record()
    record.config_records["fields"]["train_loss"] = float("nan")
    with pytest.raises(ProtocolError, match="'train_loss'.*finite"):
        TrainReply.from_record(record)
    with pytest.raises(ProtocolError, match="expected a TrainReply"):
        TrainReply.from_record(request().to_record())


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY\x01\x00", b"not npy at all, but long enough to look"])
def test_damaged_arrays_are_refused_by_name(data: bytes) -> None:
    record = request().to_record()
    arrays = through_bytes(record.array_records["arrays"])
    arrays["w"] = Array("float32", (3, 2), "numpy.ndarray", data)
    record["arrays"] = arrays
    with pytest.raises(ProtocolError, match="tensor 'w'"):
        TrainRequest.from_record(record)


def npy(header: str, values: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + values


@pytest.mark.parametrize(
    "data",
    [
        npy("-" * 9000 + "1"),
        npy("-".join(["1"] * 4000)),
        npy("(" * 5000),
        npy("{'descr': '>f4', 'fortran_order': False, 'shape': (3, 2), }\n", bytes(24)),
        npy("{'descr': '<f4', 'fortran_order': 1, 'shape': (3, 2), }\n", bytes(24)),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -2), }\n", bytes(24)),
        npy("{'descr': '|O8', 'fortran_order': False, 'shape': (3, 2), }\n", bytes(48)),
    ],
)
def test_a_header_that_would_exhaust_its_reader_is_refused_by_name(data: bytes) -> None:
    record = ArrayRecord()
    record["w"] = Array("float32", (3, 2), "numpy.ndarray", data)
    with pytest.raises(ProtocolError, match="reply: tensor 'w'"):
        unpack(record, "reply")


def test_an_array_pickles_as_an_ordinary_one() -> None:
    tensor = torch.randn(3, 2)
    (array,) = pack({"w": tensor}).values()
    # Flower's simulation pickles messages between its processes; copying takes the same way
    copy = deepcopy(array)
    assert type(copy) is Array
    assert copy.data == array.data
    assert torch.equal(unpack(ArrayRecord({"w": copy}), "copy")["w"], tensor)


@pytest.mark.parametrize("run", ["", "../../escaped", "/tmp/escaped", "0" * 15, "A" * 16, "0" * 16 + "\n"])
def test_a_run_that_is_no_token_names_no_folder(run: str) -> None:
    record = request().to_record()
    record.config_records["fields"]["run"] = run
    with pytest.raises(ProtocolError, match="'run': found .* allowed 16 hexadecimal digits"):
        TrainRequest.from_record(record)
    with pytest.raises(ProtocolError, match="'run'"):
        replace(request(), run=run).to_record()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (request(), "experiment"),
        (request(), "class_order"),
        (request(), "previous"),
        (DigestRequest(**STAMP, encoder="f" * 64), "encoder"),
        (FinishTaskReply(**STAMP), "model"),
    ],
)
def test_a_hash_is_64_digits_and_nothing_else(message: WireMessage, name: str) -> None:
    record = message.to_record()
    type(message).from_record(record)
    for value in ("../models/other", "f" * 63, "F" * 64, "f" * 65):
        record.config_records["fields"][name] = value
        with pytest.raises(ProtocolError, match=f"{name!r}: found .* allowed 64 hexadecimal digits"):
            type(message).from_record(record)


def test_a_site_s_name_is_no_path() -> None:
    def reply(name: str) -> DescribeReply:
        return DescribeReply(version=1, site=name, experiment="e" * 64, answers=[], require_privacy="none")

    for name in ("", ".", "..", "../graz", "a/b", "a\nb", "a\x1b[2J", "a" * 65):
        with pytest.raises(ProtocolError, match="'site': found .* allowed 1 to 64 printable"):
            reply(name).to_record()
    assert DescribeReply.from_record(reply("LKH Graz Süd, 3").to_record()).site == "LKH Graz Süd, 3"
