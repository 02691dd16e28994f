"""safetensors files, written piece by piece from the tensors' own memory.

The library's `save` makes a copy of all tensors, wants one storage for each, and writes metadata in the order
of a hash table, so that two files of one model would have different hashes.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = struct.Struct("<Q")
"""A safetensors file begins with the length of its header, a JSON object."""
ALIGNMENT = 8
METADATA = "__metadata__"
NAMES = {
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""NumPy's names of types and the format's, in the order in which the library writes them."""


def yield_pieces(
    tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, equal for equal content: the header, then each tensor.

    tensors: may be views of one storage. Only one that is on a device or not contiguous is copied, when its
    turn comes.
    Raises ValueError for a type that NumPy does not have.
    """
    order = list(NAMES)
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if unknown := sorted(set(types.values()) - NAMES.keys()):
        raise ValueError(f"tensors of {', '.join(unknown)}, allowed {', '.join(order)}")
    names = sorted(tensors, key=lambda name: (order.index(types[name]), name))
    header: dict[str, object] = {} if metadata is None else {METADATA: dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[types[name]],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield LENGTH.pack(len(text)) + text
    for name in names:
        values = tensors[name].detach().cpu().contiguous().numpy()
        yield values.reshape(-1).view(np.uint8).data
