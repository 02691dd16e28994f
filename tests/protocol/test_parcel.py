"""A message as one object on the network: the same message, and nothing that a stranger can make of it."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from perennial.foundation.errors import ProtocolError
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stack import LARGEST, PARCEL, is_parcel, open_parcel, pack_parcel
from perennial.protocol.tensors import Tensors, pack, unpack
from perennial.server.live_status import ForwardingGrid, ParcelGrid
from tests.deployed_site import DeployedSite


def sent(record: RecordDict) -> RecordDict:
    """As it arrives at the other end of a network."""
    return RecordDict.inflate(record.deflate(), children=dict_of_children(record))


def dict_of_children(record: RecordDict) -> dict[str, Any]:
    return {
        child.object_id: type(child).inflate(child.deflate(), dict_of_children(child))  # type: ignore[arg-type]
        for child in (record.children or {}).values()
    }


def objects(record: Any) -> int:
    """How many of them Flower carries for a record."""
    return 1 + sum(objects(child) for child in (record.children or {}).values())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DeployedSite:
    return DeployedSite(tmp_path_factory.mktemp("site"))


def test_every_request_comes_out_of_its_parcel_as_it_went_in(site: DeployedSite) -> None:
    for request in site.every_request():
        parcel = pack_parcel(request.to_record())
        assert objects(parcel) == 2, "the record and its one part"
        back = open_parcel(sent(parcel))
        assert list(back) == list(request.to_record())
        again = type(request).from_record(back)
        for name, value in vars(request).items():
            other = getattr(again, name)
            if isinstance(value, dict):
                assert list(value) == list(other)
                assert all(torch.equal(value[key], other[key]) for key in value)
                assert all(value[key].dtype == other[key].dtype for key in value)
            elif name != "record":
                assert value == other


def test_a_site_answers_a_parcel_with_a_parcel_and_others_as_before(site: DeployedSite) -> None:
    request = site.request(TrainRequest, 1)
    assert objects(request.to_record()) > 8
    plain = site.send(request.to_record(), request.message_type)
    parcel = site.send(pack_parcel(request.to_record()), request.message_type)
    assert not is_parcel(plain) and is_parcel(parcel)
    assert read_kind(open_parcel(sent(parcel))) == read_kind(plain) != ""
    for bad in (RecordDict({PARCEL: ConfigRecord()}), RecordDict({PARCEL: ArrayRecord()})):
        assert not site.send(bad, request.message_type), "an error of Flower's, and the site lives on"


def test_a_large_message_and_one_of_another_app_stay_as_they_are() -> None:
    large = RecordDict({"arrays": pack({"weight": torch.zeros(LARGEST // 4 + 1)})})
    assert pack_parcel(large) is large
    foreign = RecordDict({"a/b": ConfigRecord({"x": 1})})
    assert pack_parcel(foreign) is foreign
    parcel = pack_parcel(RecordDict({"fields": ConfigRecord({"x": 1})}))
    assert pack_parcel(parcel) is parcel


class Carrier(ForwardingGrid):
    """Takes down what is pushed, and gives back replies."""

    def __init__(self, replies: list[Message]) -> None:
        self.pushed: list[Message] = []
        self.replies = replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.pushed += messages
        return [""] * len(self.pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return self.replies


def test_sites_of_one_round_are_sent_one_parcel_and_a_broken_one_is_handed_on(site: DeployedSite) -> None:
    record = site.request(TrainRequest, 1).to_record()
    good, broken = pack_parcel(record), RecordDict({PARCEL: ConfigRecord({"fields/message": "TrainReply"})})
    carrier = Carrier([Message(content, 7, "train") for content in (good, broken)])
    grid = ParcelGrid(carrier)
    messages = [Message(record, node, "train") for node in (1, 2)]
    grid.push_messages(messages)
    assert [message.content for message in carrier.pushed] == [good, good]
    grid.push_messages(messages)
    assert carrier.pushed[2].content == good, "sent again, it is not wrapped twice"
    first, second = grid.pull_messages([])
    assert read_kind(first.content) == "TrainRequest"
    assert read_kind(second.content) == "", "the gate drops it"


VALUES = st.one_of(
    st.integers(-(2**60), 2**60),
    st.binary(max_size=200),
    st.sampled_from(["", "fields", "1"]),
    st.lists(st.sampled_from(["arrays", "fields", "w", "", "/"]), max_size=3),
)
KEYS = st.sampled_from(["/", "arrays/", "arrays/w", "fields/x", "fields/", "//", "x", "", "arrays//w"])


@given(st.dictionaries(KEYS, VALUES))
def test_whatever_a_stranger_puts_into_a_parcel_is_read_or_refused(entries: dict[str, Any]) -> None:
    parcel = RecordDict({PARCEL: ConfigRecord(entries)})
    try:
        found = open_parcel(parcel)
    except ProtocolError:
        return
    for name, part in found.items():
        if isinstance(part, ArrayRecord):
            try:
                assert isinstance(unpack(part, name), Tensors)
            except ProtocolError:
                continue


def test_a_record_beside_the_parcel_is_refused() -> None:
    parcel = pack_parcel(RecordDict({"fields": ConfigRecord({"x": 1})}))
    parcel["more"] = ConfigRecord()
    with pytest.raises(ProtocolError, match="2 records"):
        open_parcel(parcel)
