"""Converts named tensors to and from Flower's ArrayRecord, without a needless copy.

Inside one process a tensor travels as itself: TensorArray is a Flower Array that serialises only when
somebody asks for its bytes, so the in-process engine moves models on the device and the gRPC engine moves
the same bytes that NumPy's .npy format defines.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from numpy.lib import format as npy

from perennial.foundation.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

Record = TypeVar("Record", ArrayRecord, ConfigRecord)
ALLOWED_DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")
_NUMPY_SERIALISED = "numpy.ndarray"
_MAGIC = b"\x93NUMPY\x01\x00"
"""Of a .npy file, and its version 1.0."""
_HEADER = re.compile(
    rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d{1,18},? ?){0,64})\),? ?\} {0,128}\n"
)
"""As NumPy writes it, of a plain array. It is matched, and not read as the Python expression that
it is, because a stranger's expression can exhaust whoever reads it."""


class Tensors(dict[str, "Tensor"]):
    """Named tensors; the type of a message field that carries arrays. Not to be changed once it is filled."""

    @cached_property
    def norm(self) -> float:
        """L2 norm over all floating-point tensors.

        Infinite or NaN when a value is, or when it overflows float32. `unpack` has computed it already while
        it looked for such values.
        """
        return float(_combine_norms(list(_compute_norms(self).values())))


class TensorArray(Array):
    """A Flower Array that holds a tensor and becomes .npy bytes only on demand.

    tensor: detached, any device, contiguous or not. It is shared, not copied: whoever receives it must not
    write to it.
    """

    tensor: "Tensor"
    known_finite = False
    """Whether a receiver in this process has looked already; all sites of a round are
    sent the same arrays."""

    def __init__(self, tensor: "Tensor") -> None:
        # not by attribute: Array's own setter keeps books about bytes that do not exist yet
        self.__dict__.update(
            tensor=tensor,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype=_NUMPY_SERIALISED,
        )

    @cached_property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = self.tensor.detach().cpu().contiguous().numpy()
        return _build_npy_header(values.dtype.str, values.shape) + values.tobytes()

    def numpy(self) -> Any:
        return self.tensor.detach().cpu().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, as Flower's simulation does between its processes, it is an ordinary Array."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


# Flower writes the class's qualified name into every object it sends: on the wire this is an Array
TensorArray.__qualname__ = Array.__qualname__


@lru_cache(maxsize=4096)
def _build_npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = BytesIO()
    npy.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()


@lru_cache(maxsize=4096)
def _parse_npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    found = _HEADER.fullmatch(header)
    if found is None:
        raise ValueError(f"header {header!r:.80}, allowed that of a plain array in C or Fortran order")
    shape = tuple(int(size) for size in re.findall(rb"\d+", found[3]))
    return np.dtype(found[1].decode()), shape, "F" if found[2] == b"True" else "C"


def build_array(data: bytes, where: str) -> Array:
    """A Flower Array of .npy bytes, with the type and shape that they state.

    where: named in errors. Raises ProtocolError when data are no .npy bytes that may be read.
    """
    try:
        values = _decode(data)
    except Exception as error:  # whatever a stranger's bytes bring about, the run goes on
        raise ProtocolError(f"{where}: {error}") from error
    return Array(values.dtype.name, tuple(values.shape), _NUMPY_SERIALISED, data)


def _decode(data: bytes) -> np.ndarray[Any, Any]:
    """A read-only view of .npy bytes; headers repeat from round to round, so each is parsed once."""
    if data[:8] != _MAGIC or len(data) < 10:
        raise ValueError("not .npy data of version 1.0")
    start = 10 + int.from_bytes(data[8:10], "little")
    dtype, shape, order = _parse_npy_header(data[10:start])
    if len(data) - start != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(data) - start} bytes do not fill shape {shape} of {dtype}")
    return np.frombuffer(data, dtype=dtype, offset=start).reshape(shape, order=order)


def fill_record(record: Record, entries: Mapping[str, Any]) -> Record:
    """Put entries of known, right names and types into a new record, and return it.

    Flower checks each entry that is set, which costs a message of this project more than its making.
    """
    record.__dict__["_data"].update(entries)
    return record


def pack(tensors: Mapping[str, "Tensor"]) -> ArrayRecord:
    """An ArrayRecord that shares the tensors' memory."""
    return fill_record(ArrayRecord(), {name: TensorArray(tensor) for name, tensor in tensors.items()})


def unpack(record: ArrayRecord, where: str) -> Tensors:
    """The tensors of an ArrayRecord, zero-copy and not to be written to.

    where: the message and field, for errors. Raises ProtocolError naming the tensor when its bytes are
    malformed, its dtype is not allowed, or a value is NaN or infinite.
    """
    import torch

    tensors = Tensors()
    unseen: dict[str, Tensor] = {}
    shared: list[TensorArray] = []
    for name, array in record.items():
        if isinstance(array, TensorArray):
            tensors[name] = array.tensor
            if not array.known_finite:
                shared.append(array)
                unseen[name] = array.tensor
        else:
            if array.stype != _NUMPY_SERIALISED or array.dtype not in ALLOWED_DTYPES:
                raise ProtocolError(
                    f"{where}: tensor {name!r}: found {array.stype} of {array.dtype}, "
                    f"allowed {_NUMPY_SERIALISED} of {', '.join(ALLOWED_DTYPES)}"
                )
            try:
                values = _decode(array.data)
            except Exception as error:  # whatever a stranger's bytes bring about, the run goes on
                raise ProtocolError(f"{where}: tensor {name!r}: {error}") from error
            if tuple(array.shape) != values.shape or array.dtype != values.dtype.name:
                raise ProtocolError(
                    f"{where}: tensor {name!r}: declared {array.dtype} {tuple(array.shape)}, "
                    f"found {values.dtype} {values.shape}"
                )
            # the contract above is what protects the bytes
            silence_read_only_warning()
            tensors[name] = unseen[name] = torch.from_numpy(values)
    norm = _require_finite(unseen, where)
    if len(unseen) == len(tensors):
        tensors.norm = norm
    for array in shared:
        array.known_finite = True
    return tensors


def _require_finite(tensors: Mapping[str, "Tensor"], where: str) -> float:
    """The norm of all floating-point tensors.

    Raises ProtocolError naming the first tensor that holds NaN or an infinity. Its norm is not finite then,
    so one pass over the values gives both answers.
    """
    norms = _compute_norms(tensors)
    # all tensors wait for one answer of the device
    norm = float(_combine_norms(list(norms.values())))
    if not math.isfinite(norm):
        for name, part in norms.items():
            if not math.isfinite(float(part)):
                raise ProtocolError(f"{where}: tensor {name!r}: holds NaN, infinite or overflowing values")
        raise ProtocolError(f"{where}: the norm over all tensors overflows float32")
    return norm


def _compute_norms(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """name -> L2 norm of each floating-point tensor, at least in float32."""
    import torch

    return {
        name: torch.linalg.vector_norm(
            tensor, dtype=torch.float32 if tensor.dtype == torch.float16 else tensor.dtype
        )
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def _combine_norms(norms: "list[Tensor]") -> "Tensor":
    import torch

    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


@lru_cache(maxsize=1)
def silence_read_only_warning() -> None:
    """Silence PyTorch's warning about tensors in the read-only bytes of a message."""
    import warnings

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def count_bytes(tensors: Mapping[str, "Tensor"]) -> int:
    """Bytes of the tensors' values, without the headers (at most 128 bytes a tensor)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def hash_tensors(tensors: Mapping[str, "Tensor"]) -> str:
    """SHA-256 (hex) of the tensors' bytes in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
