"""The reference of every key of experiment.yaml and site.yaml, from the schema that checks the files."""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from perennial.config.experiment import Experiment
from perennial.config.site import SiteConfig

PAGES: dict[str, tuple[type[BaseModel], str]] = {
    "experiment_yaml": (
        Experiment,
        "`experiment.yaml` says everything that a run needs and nothing about a machine. `perennial "
        "init DATA` writes one, "
        "`perennial check FILE` reads it and says what would happen.",
    ),
    "site_yaml": (
        SiteConfig,
        "`site.yaml` is the hospital's, and no message can override it. Of its `data` block a site "
        "says how its own data "
        "are read; the experiment decides the rest ([your own data](../docs/data_files.md#real-sites)).",
    ),
}


def schema_page(name: str) -> str:
    """The whole page of one file."""
    model, introduction = PAGES[name]
    title = name.replace("_yaml", ".yaml")
    lines = [f"# {title}: every key", "", introduction, ""]
    for path, block in blocks(model):
        lines += [f"## {path or 'The file'}", ""]
        if prose := _prose(block):
            lines += [prose, ""]
        lines += ["| key | allowed | default | what |", "| --- | --- | --- | --- |"]
        told = explanations(block)
        for key, field in block.model_fields.items():
            cells = (f"`{key}`", _allowed(field), _default(field), told.get(key, ""))
            lines.append(
                "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
            )
        lines.append("")
    return "\n".join(lines)


def blocks(
    model: type[BaseModel], path: str = "", around: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, model) of a file and every block in it, each once for each place.

    A block that can hold its own kind, as a network's features can be another network's, ends there.
    """
    yield path, model
    for key, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            if inner not in (*around, model):
                yield from blocks(inner, f"{path}.{key}".lstrip("."), (*around, model))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


def explanations(model: type[BaseModel]) -> dict[str, str]:
    """Key -> what it is: from the string below the field, or from the docstring (`key: what it is`)."""
    found: dict[str, str] = {}
    for ancestor in reversed(model.__mro__):
        if isinstance(ancestor, type) and issubclass(ancestor, BaseModel) and ancestor is not BaseModel:
            found |= _of_docstring(ancestor) | _below_fields(ancestor)
    return found


def _below_fields(model: type[BaseModel]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found, last = {}, None
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.target.id
            continue
        value = statement.value if isinstance(statement, ast.Expr) else None
        if last and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[last] = " ".join(value.value.split())
        last = None
    return found


def _entries(model: type[BaseModel]) -> tuple[str, list[tuple[list[str], str]]]:
    """(what stands before the first key, [(keys, what they are)]) of a docstring."""
    text = " ".join((inspect.getdoc(model) or "").split())
    keys = "|".join(sorted(model.model_fields, key=len, reverse=True)) or "(?!)"
    pattern = rf"(?:^|(?<=[.;] ))((?:{keys})(?:, (?:{keys}))*)(?: \([a-z, ]+\))?: "
    pieces = re.split(pattern, text)
    pairs = zip(pieces[1::2], pieces[2::2], strict=True)
    return pieces[0].strip(), [(names.split(", "), words.strip()) for names, words in pairs]


def _of_docstring(model: type[BaseModel]) -> dict[str, str]:
    return {key: words for names, words in _entries(model)[1] for key in names}


def _prose(model: type[BaseModel]) -> str:
    return _entries(model)[0]


def _allowed(field: FieldInfo) -> str:
    limits = [_limit(entry) for entry in field.metadata]
    return ", ".join([_type_words(field.annotation), *filter(None, limits)])


def _limit(entry: Any) -> str:
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return ", ".join(f"{word} {getattr(entry, key):g}" for key, word in signs.items() if hasattr(entry, key))


def _type_words(annotation: Any) -> str:
    """A type in the words of a person who writes YAML."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = [_limit(entry) for entry in arguments[1:]]
        return " ".join([_type_words(arguments[0]), *filter(None, limits)])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(part) for part in arguments))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        inner = [part for part in arguments if part is not Ellipsis]
        return f"list of {' and '.join(dict.fromkeys(_type_words(part) for part in inner))}"
    if origin is dict:
        return f"mapping of {_type_words(arguments[0])} to {_type_words(arguments[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a block"
    plain = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Path": "path"}
    return plain.get(getattr(annotation, "__name__", ""), "any value")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, BaseModel):
        return "a block of defaults"
    if value is None:
        return "none"
    if value in ((), [], {}):
        return "empty"
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return f"`{list(shown) if isinstance(shown, tuple) else shown}`"
