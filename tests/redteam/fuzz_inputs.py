"""Turns a fuzzer's bytes into messages and files of a stranger, most of them nearly valid."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SCALARS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 2**31, 2**63 - 1, -(2**63), 10**6, 0.0, -0.0, 0.5, 1e308, -1e308),
    *(
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        "",
        "0",
        "x" * 300,
        "\0",
        "\n",
        "é",
        "{}",
        "[]",
        "{",
        "null",
    ),
    *('{"turn": {}}', '{"turn": {"sweep": 1, "segments": 4}}', '{"correction": {"name": "scaffold"}}'),
    *('{"tell": ["label_counts"]}', '{"tell": 5}', '{"prototypes": {}}', "[" * 5000, '{"correction": []}'),
    *(
        "head.weight",
        "head.bias",
        "a" * 16,
        "0" * 64,
        "sparsity",
        "average",
        "model",
        "vgg11",
        b"",
        b"\0" * 9,
    ),
    *([], [0], [1.5], ["x"], [""], ["head.weight", "head.weight"], [True], [2**40] * 3, [math.nan]),
)
DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool", "<U4", "object", "complex64")
SHAPES = ((), (0,), (1,), (5,), (10,), (0, 3), (5, 8), (10, 8), (1, 1, 1), (64,), (8, 64), (3, 0, 3))


@dataclass
class Choices:
    """Decisions, read from the bytes of an input one after the other; zeros when they are used up."""

    data: bytes
    at: int = field(default=0, init=False)

    def number(self, below: int) -> int:
        """A whole number from 0 and below a bound."""
        taken = self.data[self.at : self.at + 2]
        self.at += 2
        return int.from_bytes(taken, "little") % below

    def pick(self, options: Any) -> Any:
        return options[self.number(len(options))]

    def rarely(self, one_in: int) -> bool:
        return self.number(one_in) == one_in - 1

    def text(self) -> str:
        length = self.number(40)
        taken = self.data[self.at : self.at + length]
        self.at += length
        return taken.decode("utf-8", errors="replace")


def changed_record(choices: Choices, record: RecordDict) -> RecordDict:
    """A record with a few of its fields left out, replaced, or joined by others."""
    result = RecordDict()
    for name, part in record.items():
        if choices.rarely(12):
            continue
        if isinstance(part, ConfigRecord):
            result[name] = _changed_fields(choices, part)
        elif isinstance(part, ArrayRecord):
            result[name] = _changed_arrays(choices, part)
    if choices.rarely(10):
        result[choices.pick(("fields", "arrays", "previous_arrays", "other"))] = (
            _changed_arrays(choices, ArrayRecord()) if choices.rarely(2) else ConfigRecord()
        )
    return result


def _changed_fields(choices: Choices, fields: ConfigRecord) -> ConfigRecord:
    result = ConfigRecord()
    for name, value in fields.items():
        if choices.rarely(14):
            continue
        _put(result, name, _value(choices) if choices.rarely(9) else value)
    for _ in range(choices.number(3) if choices.rarely(3) else 0):
        known = ("settings", "personal", "clip_norm", "progress", "previous", "epsilon", "delta", "layers")
        _put(result, choices.pick((*known, "message", choices.text())), _value(choices))
    return result


def _value(choices: Choices) -> Any:
    return choices.text() if choices.rarely(4) else choices.pick(SCALARS)


def _put(record: ConfigRecord, name: str, value: Any) -> None:
    try:
        record[name] = value
    except (TypeError, ValueError):
        record[name] = str(value)  # Flower carries no such value, so no message can


def _changed_arrays(choices: Choices, arrays: ArrayRecord) -> ArrayRecord:
    result = ArrayRecord()
    for name, array in arrays.items():
        if choices.rarely(25):
            continue
        result[name] = _changed_array(choices, array) if choices.rarely(8) else array
    if choices.rarely(6):
        names = ("means", "control/head.weight", "head.weight", "features", "x", "", choices.text())
        result[choices.pick(names)] = _array(choices)
    return result


def _array(choices: Choices) -> Array:
    dtype = choices.pick(DTYPES[:7])
    values = np.full(choices.pick(SHAPES), choices.pick((0, 1, -1, math.nan, math.inf, 3e38, 1e-45)))
    with np.errstate(all="ignore"):
        return Array(values.astype(dtype))


def _changed_array(choices: Choices, array: Array) -> Array:
    way = choices.number(6)
    if way == 0:
        return _array(choices)
    data, dtype, shape, stype = bytearray(array.data), array.dtype, tuple(array.shape), array.stype
    if way == 1 and data:
        for _ in range(1 + choices.number(4)):
            data[choices.number(len(data))] = choices.number(256)
    elif way == 2:
        data = data[: choices.number(len(data) + 1)]
    elif way == 3:
        dtype = choices.pick(DTYPES)
    elif way == 4:
        shape = choices.pick(((-1,), (2**40, 2**40), (2**62,), (1, 2, 3)))
    else:
        stype = choices.pick(("numpy.ndarray", "", "pickle", choices.text()))
    return Array(dtype=dtype, shape=shape, stype=stype, data=bytes(data))


def changed_yaml(choices: Choices, content: dict[str, Any]) -> str:
    """The text of a file: a content with a few of its values changed, or with bytes put into its text."""
    text = yaml.safe_dump(_changed_tree(choices, content, 0), allow_unicode=True, sort_keys=False)
    if choices.rarely(3):
        for _ in range(1 + choices.number(3)):
            place = choices.number(len(text) + 1)
            pieces = (
                "&a ",
                "*a",
                "? ",
                ": ",
                "\n",
                "- ",
                "{",
                "[",
                "<<: *a",
                "!!set ",
                "|",
                "~",
                "0x",
                '"',
                "#",
            )
            text = f"{text[:place]}{choices.pick((*pieces, choices.text()))}{text[place:]}"
    return text


def _changed_tree(choices: Choices, value: Any, depth: int) -> Any:
    if choices.rarely(20):
        return choices.pick((*SCALARS, None, {}, {None: 1}, {1: 2}, [None], {"name": None}, {"name": "x"}))
    if isinstance(value, dict):
        changed = {
            key: _changed_tree(choices, item, depth + 1)
            for key, item in value.items()
            if not choices.rarely(20)
        }
        if choices.rarely(8):
            changed[choices.pick((*SCALARS[:12], None, "base", "name", "kind", choices.text()))] = (
                choices.pick(SCALARS[:40])
            )
        return changed
    if isinstance(value, list):
        return [_changed_tree(choices, item, depth + 1) for item in value] * choices.pick((1, 1, 1, 0, 3))
    return value
