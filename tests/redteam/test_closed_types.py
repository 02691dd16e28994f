"""Whatever is made from bytes of others has a closed type, all the way down.

The test finds every function that parses text or a file of tensors, and walks through the type it returns:
nothing on the way may be `Any`, `object`, a mapping without types, or a model that takes further keys without
a type for them. A plug-in's own keys are `Plain` (foundation/plain.py): text, numbers, lists, mappings.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from pydantic import BaseModel
from typing_extensions import TypeAliasType, is_typeddict

import perennial
from perennial.config.experiment import Experiment
from perennial.config.site import SiteConfig
from perennial.deploy.application import Offer
from perennial.deploy.federation import Federation, SiteRecord
from perennial.foundation.plain import Plain
from perennial.models import saved
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.server.checkpoint import Checkpoint

PACKAGE = Path(perennial.__file__).parent
ROOMS = ("config", "models", "protocol", "client", "strategies/round", "deploy")
FILES = ("server/checkpoint.py", "foundation/plain.py")
"""Where bytes of others are read; arrays of data and own journals are elsewhere."""
PARSERS = {
    *(
        "json.loads",
        "json.load",
        "yaml.load",
        "yaml.safe_load",
        "tomllib.loads",
        "safe_open",
        "load_from_string",
    ),
    *("model_validate_json", "validate_json", "np.load", "torch.load", "from_record", "read_object"),
    *("parse_yaml", "read_yaml", "load"),
}
READERS = ("read_settings", "read_settings_part")
"""They validate a part of a request's settings as the type that they are given."""
RAW = {
    "config/yaml_file.py:read_yaml": "a mapping that `validate` makes a typed model of",
    "config/yaml_file.py:parse_yaml": "likewise",
    "config/yaml_file.py:_parsed": "likewise",
}
"""Functions that hand plain values on to what types them."""
LEAVES = (
    Tensors,
    WireMessage,
    Message,
    str,
    int,
    float,
    bool,
    bytes,
    type(None),
    Path,
    torch.Tensor,
    torch.nn.Module,
    enum.Enum,
    RecordDict,
)
"""Values that hold no further names. A module is one of ours or of a plug-in in use; messages have a test."""
BARE = (dict, list, tuple, set, frozenset, typing.Mapping, typing.Sequence)
LATER = {"Tensor": torch.Tensor, "TrainRequest": TrainRequest}
"""Names that modules import for type checkers alone."""
ROOTS: dict[str, Any] = {
    "experiment": Experiment,
    "app": Offer,
    "site file": SiteConfig,
    "deploy.yaml": Federation,
    "operator's record of a site": SiteRecord,
    "model": saved.SavedModel,
    "model's settings": saved._StoredSettings,
    "model's inputs": saved._StoredInputs,
    "model's confidence": saved._StoredConfidence,
    "checkpoint": Checkpoint,
}


def subclasses(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


def hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def faults(hint: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """What of a type is open, with the way to it."""
    if hint is Plain:
        return
    if isinstance(hint, TypeAliasType):
        yield from faults(hint.__value__, where, seen)
        return
    if isinstance(hint, typing.TypeVar) or hint in (typing.Self, typing.NoReturn):
        # the caller's own class, which stands among ROOTS or the messages
        return
    if hint in (Any, object, typing.Callable, type) or isinstance(hint, str):
        yield f"{where}: {hint}"
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return
    if origin is typing.ClassVar or hint is typing.ClassVar:
        return
    if origin is typing.Annotated:
        yield from faults(arguments[0], where, seen)
        return
    if origin is not None:
        if origin in (type, typing.get_origin(typing.Callable)):
            yield f"{where}: {hint}"
        for argument in arguments:
            if argument is not Ellipsis:
                yield from faults(argument, where, seen)
        if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or issubclass(origin, BaseModel)):
            yield from faults(origin, where, seen)
        return
    if hint in BARE:
        yield f"{where}: {hint} of anything"
        return
    if not isinstance(hint, type):
        yield f"{where}: {hint!r}"
        return
    if hint in seen or (issubclass(hint, LEAVES) and not hasattr(hint, "_fields")):
        return
    seen.add(hint)
    if issubclass(hint, BaseModel):
        if hint.model_config.get("extra") == "allow":
            extra = hint.__annotations__.get("__pydantic_extra__", Any)
            yield from faults(
                typing.get_args(extra)[-1] if typing.get_args(extra) else Any, f"{where}.*", seen
            )
        for name, field in hint.model_fields.items():
            yield from faults(field.annotation, f"{where}.{name}", seen)
    elif dataclasses.is_dataclass(hint) or is_typeddict(hint) or hasattr(hint, "_fields"):
        for name, item in hints_of(hint).items():
            if typing.get_origin(item) is not typing.ClassVar:
                yield from faults(item, f"{where}.{name}", seen)
    elif not issubclass(hint, Exception):
        yield f"{where}: {hint.__module__}.{hint.__qualname__}, of which nothing says what it holds"


@pytest.mark.parametrize("name", ROOTS)
def test_what_a_file_becomes_has_a_closed_type(name: str) -> None:
    assert [*faults(ROOTS[name], name, set())] == []


def test_messages_have_closed_types() -> None:
    kinds = {kind for kind in subclasses(WireMessage) if kind.__module__.startswith("perennial.")}
    assert len(kinds) >= 20
    hints = [(f"{kind.__name__}.{name}", hint) for kind in kinds for name, hint in hints_of(kind).items()]
    assert [fault for name, hint in hints for fault in faults(hint, name, set())] == []


def test_settings_of_requests_have_closed_types() -> None:
    kinds = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Call) and called(node).rpartition(".")[2] in READERS
            if reads and isinstance(node.args[-2], ast.Constant) and isinstance(node.args[-1], ast.Name):  # type: ignore[union-attr]
                name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
                kinds.append(getattr(importlib.import_module(name), node.args[-1].id))  # type: ignore[union-attr]
    assert len(kinds) >= 2
    assert [fault for kind in kinds for fault in faults(kind, kind.__name__, set())] == []


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def parsing_functions() -> Iterator[tuple[str, str, str]]:
    """(file, qualified name, what it calls) of every function that parses."""
    paths = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    for path in (*paths, *(PACKAGE / name for name in FILES)):
        where = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        owners = {
            id(child): f"{owner.name}."
            for owner in tree.body
            if isinstance(owner, ast.ClassDef)
            for child in owner.body
        }
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            calls = {called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
            found = {
                call for call in calls if call in PARSERS or call.rpartition(".")[2] in PARSERS - {"load"}
            }
            if found:
                yield where, owners.get(id(function), "") + function.name, ", ".join(sorted(found))


def returned(where: str, name: str) -> Any:
    module: Any = importlib.import_module("perennial." + where.removesuffix(".py").replace("/", "."))
    found = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    found = getattr(found, "func", getattr(found, "fget", found))
    found = inspect.unwrap(found) if found is not None else None
    if not isinstance(found, types.FunctionType):
        return None
    return typing.get_type_hints(found, localns=LATER, include_extras=True).get("return", Any)


def test_every_function_that_parses_returns_a_closed_type() -> None:
    open_, checked = [], 0
    for where, name, calls in parsing_functions():
        if f"{where}:{name}" in RAW or (hint := returned(where, name)) is None:
            continue
        checked += 1
        open_ += [f"{where}:{name} ({calls}): {fault}" for fault in faults(hint, "", set())]
    assert checked > 30
    assert open_ == []
