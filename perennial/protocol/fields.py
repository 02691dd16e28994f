"""How a frozen dataclass becomes a RecordDict and back, field by field, with nothing left unchecked.

Scalars go into one ConfigRecord named "fields"; each field of type Tensors goes into an ArrayRecord of the
field's name. A field may be `X | None`: None travels as absence. What a number or a text may be is declared
next to the field, by `bounded`, `matching` and `hexadecimal`.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from perennial.foundation.errors import ProtocolError, suggest_nearest
from perennial.protocol.tensors import Tensors, count_bytes, fill_record, pack, unpack

_FIELDS = "fields"
_MESSAGE = "message"
"""Key of the message class in that record; no message may have a field of this name."""


def bounded(low: float, high: float = math.inf, **kwargs: Any) -> Any:
    """A dataclass field whose number, or whose list's every number, must lie in [low, high]."""
    return dataclasses.field(metadata={"low": low, "high": high}, **kwargs)


def matching(holds: Callable[[str], object], allowed: str, **kwargs: Any) -> Any:
    """A dataclass field of a text for which holds() is true. allowed: which texts, for errors."""
    return dataclasses.field(metadata={"holds": holds, "allowed": allowed}, **kwargs)


def at_most(characters: int, **kwargs: Any) -> Any:
    """A dataclass field of a text of at most this many characters. kwargs: of dataclasses.field."""
    return matching(lambda text: len(text) <= characters, f"{characters} characters at most", **kwargs)


def hexadecimal(digits: int, **kwargs: Any) -> Any:
    """A dataclass field of this many lower-case hexadecimal digits, or '' if that is its default."""
    pattern, allowed = rf"[0-9a-f]{{{digits}}}", f"{digits} hexadecimal digits"
    if kwargs.get("default") == "":
        pattern, allowed = f"({pattern})?", f"{allowed} or ''"
    return matching(re.compile(pattern).fullmatch, allowed, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: type
    item: type | None
    optional: bool
    low: float
    high: float
    holds: Callable[[str], object] | None
    allowed: str


@lru_cache(maxsize=64)
def _build_layout(cls: type) -> dict[str, _Field]:
    hints = typing.get_type_hints(cls)
    layout = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        optional = False
        if isinstance(hint, types.UnionType):
            (hint,) = [h for h in typing.get_args(hint) if h is not type(None)]
            optional = True
        origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
        layout[field.name] = _Field(
            field.name,
            origin,
            arguments[0] if arguments else None,
            optional,
            field.metadata.get("low", -math.inf),
            field.metadata.get("high", math.inf),
            field.metadata.get("holds"),
            field.metadata.get("allowed", ""),
        )
    return layout


def _check(cls: type, field: _Field, value: Any) -> Any:
    """The value, converted only from int to float; raises ProtocolError naming message and field."""

    def fail(allowed: str) -> ProtocolError:
        return ProtocolError(f"{cls.__name__}: field {field.name!r}: found {value!r:.80}, allowed {allowed}")

    def check_item(item: Any, kind: type) -> Any:
        if kind is float and type(item) is int:
            item = float(item)
        if type(item) is not kind:
            raise fail(kind.__name__)
        if kind in (int, float) and not (math.isfinite(item) and field.low <= item <= field.high):
            raise fail(f"a finite {kind.__name__} in [{field.low}, {field.high}]")
        if field.holds is not None and not field.holds(item):
            raise fail(field.allowed)
        return item

    if field.kind is list:
        if not isinstance(value, list | tuple):
            raise fail(f"a list of {field.item and field.item.__name__}")
        return [check_item(item, field.item or str) for item in value]
    return check_item(value, field.kind)


class WireMessage:
    """Base class of every message.

    A subclass is a frozen dataclass and declares the Flower message type under which it travels.
    """

    message_type: ClassVar[str]
    public: ClassVar[tuple[str, ...]] = ()
    """Fields of a site's reply that follow from request, experiment and policy alone in a private run.

    Any other field but the stamp's is released, and charged."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the values of all the tensors in this message."""
        fields = (
            getattr(self, name) for name, field in _build_layout(type(self)).items() if field.kind is Tensors
        )
        return sum(count_bytes(tensors) for tensors in fields if tensors)

    @cached_property
    def record(self) -> RecordDict:
        """to_record(), made once: for a message that goes to several sites."""
        return self.to_record()

    def to_record(self) -> RecordDict:
        """The RecordDict that travels. Raises ProtocolError when a field is not what its type says."""
        cls = type(self)
        scalars: dict[str, Any] = {_MESSAGE: cls.__name__}
        record = RecordDict()
        for field in _build_layout(cls).values():
            value = getattr(self, field.name)
            if value is None:
                if not field.optional:
                    raise ProtocolError(f"{cls.__name__}: field {field.name!r} is missing")
            elif field.kind is Tensors:
                record[field.name] = pack(value)
            else:
                scalars[field.name] = _check(cls, field, value)
        record[_FIELDS] = fill_record(ConfigRecord(), scalars)
        return record

    @classmethod
    def from_record(cls, record: RecordDict) -> Self:
        """Read the message from a record. Raises ProtocolError naming the first faulty field."""
        layout = _build_layout(cls)
        found = read_kind(record)
        if found != cls.__name__:
            raise ProtocolError(f"expected a {cls.__name__}, found {found!r}")
        # a plain dictionary is looked at faster than a record
        scalars = dict(typing.cast(ConfigRecord, record[_FIELDS]).items())
        present = [n for n in scalars if n != _MESSAGE] + [n for n in record if n != _FIELDS]
        for name in present:
            if name not in layout:
                raise ProtocolError(
                    f"{cls.__name__}: unknown field {name!r:.80}{suggest_nearest(name, layout)}"
                )
        values: dict[str, Any] = {}
        for name, field in layout.items():
            if field.kind is Tensors:
                item = record.get(name)
                where = f"{cls.__name__}.{name}"
                values[name] = unpack(item, where) if isinstance(item, ArrayRecord) else None
            else:
                item = scalars.get(name)
                values[name] = None if item is None else _check(cls, field, item)
            if values[name] is None and not field.optional:
                raise ProtocolError(f"{cls.__name__}: field {name!r} is missing")
        return cls(**values)


def read_kind(record: RecordDict) -> str:
    """The name of the message class in a record, or '' when it is not one of ours."""
    fields = record.get(_FIELDS)
    kind = fields.get(_MESSAGE) if isinstance(fields, ConfigRecord) else None
    return kind if isinstance(kind, str) else ""


def record_bytes(record: RecordDict) -> int:
    """Bytes of the tensors and characters of the texts in a record, and 8 for each number."""

    def measure_value(value: Any) -> int:
        if isinstance(value, str | bytes):
            return len(value)
        return sum(map(measure_value, value)) if isinstance(value, list | tuple) else 8

    total = 0
    for part in record.values():
        for name, value in part.items():
            tensor = getattr(value, "tensor", None)  # of a message that never left this process
            content = getattr(value, "data", value)
            total += len(name) + (measure_value(content) if tensor is None else tensor.nbytes)
    return total


def find_arrays(record: RecordDict) -> ArrayRecord | None:
    """The only ArrayRecord of a record, as Flower's own replies have; None for none or several."""
    arrays: Mapping[str, ArrayRecord] = record.array_records
    return next(iter(arrays.values())) if len(arrays) == 1 else None
