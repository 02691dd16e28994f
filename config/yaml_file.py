"""Reading a YAML file into a typed model, with errors that a person can act on.

An error names the file, the key, what was found and what is allowed; a misspelt key is an error with the
nearest right one.
"""

import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from perennial.foundation.errors import ConfigError, nearest

Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key silently replace an earlier one; a person who wrote both meant neither."""


def _mapping_without_duplicates(
    loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False
) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore[reportUnknownMemberType]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError naming the file when it is missing or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file{nearest(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in YAML text. where: named in errors."""
    content = _parsed(text, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: found {type(content).__name__}, allowed a mapping of keys to values")
    return content


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        # a value that looks like a date or a number and is none is a ValueError
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None


def validate(model: type[Model], content: dict[str, Any], where: str) -> Model:
    """content as a typed model. Raises ConfigError listing every fault at once."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = [_explain(model, fault) for fault in error.errors()]
        raise ConfigError("\n".join(f"{where}: {fault}" for fault in faults)) from None


def name_only(value: Any) -> Any:
    """A block that was given as its name alone."""
    return {"name": value} if isinstance(value, str) else value


def beside(folder: Path, where: str) -> str:
    """where, absolute: from folder where it exists there, else from the working folder."""
    path = folder / where
    return str((path if path.exists() else Path.cwd() / where).resolve())


def apply_overrides(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """content with each KEY=VALUE applied; KEY is a dotted path, VALUE is YAML.

    Raises ConfigError naming the first KEY=VALUE that is none.
    """
    result = _deep_copy(content)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {override!r}: allowed KEY=VALUE, for instance learner.epochs=3")
        node = result
        *parents, last = key.strip().split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                child = node[parent] = {"name": child}
            node = child
        node[last] = _parsed(value, f"--set {override!r}")
    return result


def _deep_copy(value: Any) -> Any:
    return {key: _deep_copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _explain(model: type[BaseModel], fault: Any) -> str:
    """One sentence for one pydantic fault."""
    location = [part for part in fault["loc"] if not str(part).startswith(("function-", "lax-or", "json-or"))]
    key = ".".join(str(part) for part in location) or "the file"
    found = fault.get("input")
    if fault["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(model, location[:-1]))
        return f"unknown key {key!r}{nearest(str(location[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if fault["type"] == "missing":
        return f"key {key!r} is missing"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if isinstance(found, dict | BaseModel):
        return f"{key}: {message}" if location else message
    return f"{key}: found {found!r}; {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], location: list[Any]) -> set[str]:
    """Names of the keys allowed at a location: follows field annotations through unions."""
    models: list[type[BaseModel]] = [model]
    for part in location:
        following: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            if field is not None:
                following += _models_in(field.annotation)
        models = following or models
    return {name for candidate in models for name in candidate.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, list, tuple):
        return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]
    return []
