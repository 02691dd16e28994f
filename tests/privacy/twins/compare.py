"""Compares what two copies of a site answered, field by field, and judges every difference."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from perennial.config.experiment import Experiment
from perennial.privacy.entries import Entry
from perennial.privacy.statement import UNCOVERED
from perennial.protocol.fields import read_kind
from perennial.protocol.tensors import unpack
from tests.privacy.twins.bounds import Bound, bound_of
from tests.privacy.twins.covered import covered_by
from tests.privacy.twins.world import Answer, Ran

MOVING = re.compile(
    rb"time|second|started|finished|duration|written|pid|memory|clock|date|elapsed|cpu|disk|position"
)
"""Keys of the operator's files that no two runs have alike."""
TIMED = ("metrics.csv", "report.html", "live.jsonl")
"""Files of the run folder that are made of others, or tell seconds."""


@dataclass(frozen=True)
class Difference:
    """One path in which the copies differ.

    message: number of the message. listed: the words of the list of uncovered fields, where it is there.
    covered: kinds of the charges that cover it. moved: how far, in the units of bound, where that is known.
    """

    path: str
    message: int
    covered: tuple[str, ...] = ()
    listed: str = ""
    moved: float | None = None
    bound: float | None = None
    found: str = ""

    @property
    def objection(self) -> str:
        """What is wrong with it, or ''."""
        if self.covered:
            if self.moved is not None and self.bound is not None and self.moved > self.bound:
                return f"{self.path}: moved by {self.moved:.4g}, charged as {self.bound:.4g} at most"
            return ""
        return "" if self.listed else f"{self.path}: differs, and no charge covers it ({self.found:.120})"


def compared(first: Ran, second: Ran, experiment: Experiment, *, replaced: bool) -> list[Difference]:
    """Every difference between two copies. replaced: whether a record was replaced, and not added."""
    found: list[Difference] = []
    known: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if len(first.answers) != len(second.answers):
        found.append(Difference("messages", 0, found=f"{len(first.answers)}, {len(second.answers)}"))
    for number, (one, other) in enumerate(zip(first.answers, second.answers, strict=False)):
        found += _messages(one, other, number, experiment, known, replaced=replaced)
    number = len(first.answers)
    found += [Difference(f"operator/{path}", number, found=what) for path, what in _files(first, second)]
    if first.failed != second.failed:
        found.append(Difference("operator", number, found=second.failed or first.failed))
    return found


def _messages(
    one: Answer,
    other: Answer,
    number: int,
    experiment: Experiment,
    known: tuple[dict[str, Any], dict[str, Any]],
    *,
    replaced: bool,
) -> Iterator[Difference]:
    """known: covered fields of earlier messages of each copy, which may be sent again."""
    asked = (flattened(one.request), flattened(other.request))
    for path in sorted(asked[0].keys() | asked[1].keys()):
        if not _same(asked[0].get(path), asked[1].get(path)):
            yield Difference(f"request {path}", number)
    if one.log != other.log:
        yield _listed("log", number, "\n".join(set(one.log) ^ set(other.log)))
    if one.error != other.error:
        yield _listed("Error.reason", number, one.error or other.error)
    fields = tuple({} if answer.reply is None else flattened(answer.reply) for answer in (one, other))
    refused = [reply.get("Refusal.reason") for reply in fields]
    if any(reason is not None for reason in refused):
        if None not in refused and refused[0] != refused[1]:
            yield Difference("Refusal.reason", number, found=f"{refused[0]} | {refused[1]}")
        elif refused[0] != refused[1]:
            yield _listed("Refusal.reason", number, str(refused[0] or refused[1]))
        return
    entries = (*one.charged, *other.charged)
    if _plain(one.charged) != _plain(other.charged):
        yield Difference("charge", number, found=f"{_plain(one.charged)} {_plain(other.charged)}")
    covers = covered_by(entries)
    for path in sorted(fields[0].keys() | fields[1].keys()):
        first, second = fields[0].get(path), fields[1].get(path)
        field = path.split("/")[0].split(":")[0]
        field = ".".join(field.split(".")[:2])
        again = [
            isinstance(a, type(b)) and _same(a, b)
            for a, b in ((known[0].get(path), first), (known[1].get(path), second))
        ]
        if field in covers:
            known[0][path], known[1][path] = first, second
        if _same(first, second) or (field not in covers and all(again)):
            continue
        shapes = [np.shape(np.asarray(each)) for each in (first, second)]
        if shapes[0] != shapes[1]:
            shaped = _listed(f"{field} shape", number, f"{shapes[0]}, {shapes[1]}")
            if shaped.listed or not _unprotected(entries, field):
                yield shaped
                continue
        if field in covers:
            kinds = tuple(sorted({entry.kind for entry in entries if field in covered_by([entry])}))
            yield Difference(path, number, covered=kinds)
        else:
            yield _listed(path, number, f"{first!r:.60}, {second!r:.60}")
    yield from _moved(one, fields, entries, number, experiment, replaced=replaced)


def _moved(
    one: Answer,
    fields: tuple[Mapping[str, Any], ...],
    entries: Sequence[Entry],
    number: int,
    experiment: Experiment,
    *,
    replaced: bool,
) -> Iterator[Difference]:
    for entry in {entry.kind: entry for entry in entries if entry.protected}.values():
        found: Bound | None = bound_of(
            entry, one.request, fields[0], fields[1], experiment, replaced=replaced
        )
        if found is not None and found.moved > 0:
            yield Difference(found.field, number, (entry.kind,), moved=found.moved, bound=found.bound)


def _unprotected(entries: Sequence[Entry], field: str) -> bool:
    return any(field in covered_by([entry]) and not entry.protected for entry in entries)


def _plain(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    return [
        (e.kind, e.mechanism, e.noise_multiplier, e.sample_rate, e.steps, e.epsilon, e.part) for e in entries
    ]


def _listed(path: str, number: int, text: str) -> Difference:
    words = next((item.words for item in UNCOVERED if item.covers(path, text)), "")
    return Difference(path, number, listed=words, found=text)


def flattened(record: RecordDict) -> dict[str, Any]:
    """Every value of a message by its path: `Message.field`, `Message.field/tensor`."""
    kind, found = read_kind(record), {}
    for name, part in record.items():
        if type(part).__name__ == "ArrayRecord":
            tensors = unpack(part, name)  # pyright: ignore[reportArgumentType]
            found |= {f"{kind}.{name}/{key}": value.numpy() for key, value in tensors.items()}
            continue
        holder = kind if name == "fields" else name
        for key, value in dict(part.items()).items():
            if key in ("metrics", "settings") and isinstance(value, str):
                found |= {f"{holder}.{key}.{inner}": item for inner, item in json.loads(value).items()}
            elif key != "message":
                found[f"{holder}.{key}"] = value
    return found


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and np.array_equal(
            first, second, equal_nan=first.dtype.kind == "f"
        )
    return type(first) is type(second) and first == second


def _files(first: Ran, second: Ran) -> Iterator[tuple[str, str]]:
    """Files for the operator that differ, without what no two runs have alike."""
    for name in sorted(first.files.keys() | second.files.keys()):
        if name.endswith(TIMED):
            continue
        one, other = first.files.get(name), second.files.get(name)
        if one is None or other is None:
            yield name, "is there once"
        elif one != other and (left := _lines_apart(one, other)):
            yield name, left


def _lines_apart(one: bytes, other: bytes) -> str:
    if one[8:9] == other[8:9] == b"{":
        return _tensors_apart(one, other)
    try:
        sides = [[_still(json.loads(line)) for line in text.splitlines()] for text in (one, other)]
    except ValueError:
        try:
            sides = [[_still(json.loads(text))] for text in (one, other)]
        except ValueError:
            return "differs"
    if len(sides[0]) != len(sides[1]):
        return f"{len(sides[0])} and {len(sides[1])} lines"
    return next((f"{a!r:.200} {b!r:.200}" for a, b in zip(*sides, strict=True) if a != b), "")


def _tensors_apart(one: bytes, other: bytes) -> str:
    """Of two safetensors files, whose metadata hold JSON."""
    from safetensors.numpy import load

    tensors = [load(data) for data in (one, other)]
    if tensors[0].keys() != tensors[1].keys():
        return f"{sorted(tensors[0].keys() ^ tensors[1].keys())}"
    for name, value in tensors[0].items():
        if not _same(value, tensors[1][name]):
            return name
    heads = []
    for data in (one, other):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        heads.append({key: _parsed(value) for key, value in header.get("__metadata__", {}).items()})
    return "" if heads[0] == heads[1] else _first_apart(*heads)


def _parsed(text: str) -> Any:
    try:
        return _still(json.loads(text))
    except ValueError:
        return text


def _first_apart(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        name = next(name for name, value in one.items() if value != other[name])
        return f"{name}.{_first_apart(one[name], other[name])}"
    return f"{one!r:.80} {other!r:.80}"


def _still(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _still(inner) for key, inner in value.items() if not MOVING.search(str(key).encode())}
    return [_still(inner) for inner in value] if isinstance(value, list) else value
