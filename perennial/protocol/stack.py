"""The replies of simulated sites that trained in one pass: one matrix, and what each site says beside it.

It moves inside this machine alone. The engine makes it, and nobody else can: what comes from a network is a
RecordDict of Flower's own making.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from perennial.foundation.errors import ProtocolError
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import build_array, fill_record

if TYPE_CHECKING:
    from torch import Tensor


class Stack(RecordDict):
    """The content of one message that replies to K requests of one round.

    requests: the K messages. replies: one for each, with one stamp; they hold no tensors but the update.
    rows: (K, P); each update's tensors are views of its row, in order and without gaps.
    """

    def __init__(self, requests: Sequence[Message], replies: Sequence[TrainReply], rows: "Tensor") -> None:
        super().__init__()
        self.requests, self.replies, self.rows = requests, replies, rows

    @cached_property
    def norms(self) -> list[float]:
        """L2 norm of each update, to the bits of `Tensors.norm`; not finite where a value is not."""
        import torch

        sizes = [tensor.numel() for tensor in self.replies[0].update.values()]
        parts = [torch.linalg.vector_norm(part, dim=1) for part in self.rows.split(sizes, dim=1)]
        found: list[float] = torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1).tolist()
        return found

    def split_off(self, place: int) -> Message:
        """The reply at index `place` as a message of its own."""
        return Message(self.replies[place].to_record(), reply_to=self.requests[place])


def list_answered(reply: Message) -> list[str]:
    """Ids of the messages that this message replies to."""
    if (stack := find_stack(reply)) is not None:
        return [request.metadata.message_id for request in stack.requests]
    return [reply.metadata.reply_to_message_id]


def find_stack(reply: Message) -> Stack | None:
    """The Stack in a message that holds several simulated sites' replies; None for one site's reply."""
    content = reply.content if reply.has_content() else None
    return content if isinstance(content, Stack) else None


def split_replies(reply: Message) -> list[Message]:
    """The replies in a message as one message for each site."""
    stack = find_stack(reply)
    return [reply] if stack is None else [stack.split_off(place) for place in range(len(stack.replies))]


# Flower carries every record, every array and every chunk of an array as an object of its own, which the
# SuperLink and both ends ask for one by one. For a small model that costs far more than its bytes. A parcel
# is the same RecordDict as one ConfigRecord: what is in it, and what is checked when it is read, stay the
# same.


PARCEL = "parcel"
"""Name of its one record."""
LARGEST = 2**22
"""Bytes of tensors; a larger message goes in parts, which need not all be in memory twice."""
_ORDER = "/"
"""Key of the records' names; NAME/ is that of the tensors' names of an ArrayRecord, NAME/KEY an entry."""


def pack_parcel(record: RecordDict) -> RecordDict:
    """The record as a parcel; unchanged if it is one, is too large, or holds what a parcel cannot."""
    if is_parcel(record):
        return record
    entries: dict[str, Any] = {_ORDER: list(record)}
    size = 0
    for name, part in record.items():
        if "/" in name or not isinstance(part, ArrayRecord | ConfigRecord):
            return record
        if isinstance(part, ArrayRecord):
            entries[f"{name}/"] = list(part)
            for key, array in part.items():
                entries[f"{name}/{key}"] = array.data
                size += len(array.data)
            if size > LARGEST:
                return record
        else:
            entries |= {f"{name}/{key}": value for key, value in part.items()}
    return RecordDict({PARCEL: fill_record(ConfigRecord(), entries)})


def is_parcel(record: RecordDict) -> bool:
    return PARCEL in record


def open_parcel(record: RecordDict) -> RecordDict:
    """The record in a parcel. Raises ProtocolError when it is no parcel that parcelled() could have made."""
    parcel = record.get(PARCEL)
    if len(record) != 1 or not isinstance(parcel, ConfigRecord):
        raise ProtocolError(f"parcel: found {len(record)} records, allowed one ConfigRecord {PARCEL!r}")
    entries = dict(cast(Mapping[str, Any], parcel).items())
    names = _take_names(entries, _ORDER)
    found = RecordDict()
    for name in names:
        if name in found or not name or "/" in name:
            raise ProtocolError(f"parcel: found a record of the name {name!r:.80}")
        found[name] = _take_arrays(entries, name) if f"{name}/" in entries else ConfigRecord()
    for path, value in entries.items():
        name, _, key = path.partition("/")
        part = found.get(name)
        if not isinstance(part, ConfigRecord) or not key:
            raise ProtocolError(f"parcel: found the entry {path!r:.80}, which belongs to no record")
        fill_record(part, {key: value})
    return found


def _take_arrays(entries: dict[str, Any], name: str) -> ArrayRecord:
    """The ArrayRecord of this name, taken out of the entries."""
    arrays: dict[str, Array] = {}
    for key in _take_names(entries, f"{name}/"):
        data = entries.pop(f"{name}/{key}", None)
        if not key or not isinstance(data, bytes):
            raise ProtocolError(f"parcel: tensor {key!r:.80} of {name!r:.80} is missing, or no bytes")
        arrays[key] = build_array(data, f"parcel: tensor {key!r:.80}")
    return fill_record(ArrayRecord(), arrays)


def _take_names(entries: dict[str, Any], key: str) -> list[str]:
    found = entries.pop(key, None)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ProtocolError(f"parcel: {key!r:.80} is no list of names")
    return found
