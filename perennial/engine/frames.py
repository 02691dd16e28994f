"""Encodes message contents for other processes of a run: their structure as JSON, then each tensor's bytes.

Both ends are this very code, so what arrives is not checked here; the gate checks it as ever.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from perennial.protocol.messages import TrainReply
from perennial.protocol.stack import Stack
from perennial.protocol.tensors import TensorArray, Tensors, fill_record, pack, silence_read_only_warning

Frame = bytes | memoryview
UPDATE = "update"


def encode_frames(content: RecordDict) -> Iterator[Frame]:
    """Yield a content's frames: one of JSON that describes it, then one for each tensor, which is not copied.

    Raises ValueError for a record that is neither arrays nor configuration.
    """
    said: dict[str, Any] = {}
    tensors: list[Tensor] = []
    if isinstance(content, Stack):
        said["answers"] = [request.metadata.message_id for request in content.requests]
        said["replies"] = [_list_said(reply) for reply in content.replies]
        said["shapes"] = [[name, [*tensor.shape]] for name, tensor in content.replies[0].update.items()]
        tensors.append(content.rows)
    for name, part in content.items():
        if isinstance(part, ArrayRecord):
            said[name] = list(part)
            tensors += [
                array.tensor if isinstance(array, TensorArray) else torch.from_numpy(array.numpy())
                for array in part.values()
            ]
        elif isinstance(part, ConfigRecord):
            said[name] = dict(part.items())
        else:
            raise ValueError(f"{name}: found {type(part).__name__}, allowed ArrayRecord and ConfigRecord")
    tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
    layout = [[str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for tensor in tensors]
    yield json.dumps({"said": said, "layout": layout}).encode()
    for tensor in tensors:
        if tensor.numel():
            yield tensor.numpy().data.cast("B")


def decode_frames(frame: Callable[[], bytes], requests: Mapping[str, Message]) -> RecordDict:
    """The content that frames() encoded. frame: returns the next one. requests: by id, for stacks."""
    silence_read_only_warning()
    told = json.loads(frame())
    tensors = (_read(frame, *layout) for layout in told["layout"])
    said = told["said"]
    if "answers" in said:
        rows = next(tensors)
        shapes = dict(said["shapes"])
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        replies = []
        for own, row in zip(said["replies"], rows, strict=True):
            parts = zip(shapes.items(), row.split(sizes), strict=True)
            update = Tensors({name: part.view(shape) for (name, shape), part in parts})
            replies.append(TrainReply(**own, update=update))
        return Stack([requests[answer] for answer in said["answers"]], replies, rows)
    content = RecordDict()
    for name, part in said.items():
        if isinstance(part, dict):
            content[name] = fill_record(ConfigRecord(), part)
        else:
            content[name] = pack({key: next(tensors) for key in part})
    return content


def _list_said(reply: TrainReply) -> dict[str, Any]:
    names = (field.name for field in fields(cast(Any, reply)))
    return {name: getattr(reply, name) for name in names if name != UPDATE}


def _read(frame: Callable[[], bytes], dtype: str, shape: list[int]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(np.frombuffer(frame(), dtype=dtype)).view(shape)
