"""Reading a YAML file into a typed model, with errors that a person can act on.

An error names the file, the key, what was found and what is allowed; a misspelt key is an error with the
nearest right one.
"""

import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ValidationError

from perennial.foundation.errors import ConfigError, clean_text, suggest_nearest

Model = TypeVar("Model", bound=BaseModel)

# A file may come from a stranger, who is told to be checked and not to be trusted. These are far above what a
# person writes: an experiment over ten thousand classes by name has about as many values.
LARGEST_FILE = 2**20
"""Bytes."""
MOST_VALUES = 50_000
"""Values and keys after aliases have been put in; each may hold others."""
DEEPEST = 40
TOO_DEEP = f"nested more than {DEEPEST} deep"
LONGEST_NUMBER = 100
"""Characters of a number or a date; YAML reads some numbers in time that grows with the square of these."""
MOST_FAULTS = 20


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key silently replace an earlier one; a person who wrote both meant neither.

    It stops at the first value that is nested too deeply, before the rest of the file is scanned, which would
    take time that grows with the square of the depth.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:
            event = self.peek_event()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            raise _TooDeep(f"line {event.start_mark.line + 1}: {TOO_DEEP}")
        node = super().compose_node(parent, index)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]
        self._depth -= 1
        return node


class _TooDeep(Exception):
    """Says where in the text."""


def _construct_unique_mapping(
    loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False
) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore[reportUnknownMemberType]
    seen: set[Any] = set()
    for key in keys:
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique_mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError naming the file when it is missing or not a mapping."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(f"{path}: larger than {LARGEST_FILE} bytes, which no such file needs")
        text = data.decode("utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file{suggest_nearest(path.name, siblings)}") from None
    except (OSError, ValueError) as error:
        # a name with a null character is a ValueError, and so is a byte that is no UTF-8
        raise ConfigError(f"{clean_text(str(path))}: cannot be read: {clean_text(str(error))}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in YAML text. where: named in errors."""
    content = _parse(text, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: found {type(content).__name__}, allowed a mapping of keys to values")
    _require_text_keys(content, where)
    return content


def _require_text_keys(content: dict[Any, Any], where: str, inside: str = "") -> None:
    """Refuse a block with a key that is no text, because no setting has such a key.

    Names of classes and columns may be numbers; they stand below `data`, whose own fields say so.
    Raises ConfigError.
    """
    for key, value in content.items():
        name = f"{inside}{key}"
        if not isinstance(key, str) and not inside.startswith("data."):
            raise ConfigError(
                f"{where}: {inside.rstrip('.') or 'the file'}: found key {clean_text(repr(key))}, "
                "allowed text"
            )
        if isinstance(value, dict):
            _require_text_keys(value, where, f"{clean_text(name)}.")


def _parse(text: str, where: str) -> Any:
    """The content of YAML text; its keys are text, numbers, or true and false."""
    loader = None
    try:
        loader = _UniqueKeyLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Sizes(where).of(node)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # a value that looks like a date or a number and is none is a ValueError
        raise ConfigError(f"{where}: not valid YAML: {clean_text(str(error))}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: not valid YAML: a list or mapping as a key") from error
    except _TooDeep as error:
        raise ConfigError(f"{where}: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Sizes:
    """How much YAML becomes once its aliases are put in, found without putting them in."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._known: dict[yaml.Node, int] = {}

    def of(self, node: yaml.Node, depth: int = 1) -> int:
        """Values in a node, itself included. Raises ConfigError when these, or one of them, are too much."""
        if depth > DEEPEST:
            raise self._build_error(node, TOO_DEEP)
        if node not in self._known:
            self._known[node] = MOST_VALUES + 1  # stands for a node that holds itself
            number = node.tag.rpartition(":")[2] in ("int", "float", "timestamp")
            if number and isinstance(node, yaml.ScalarNode) and len(node.value) > LONGEST_NUMBER:
                raise self._build_error(node, f"a number of more than {LONGEST_NUMBER} characters")
            self._known[node] = 1 + sum(self.of(child, depth + 1) for child in _list_children(node))
        size = self._known[node]
        if size > MOST_VALUES:
            raise self._build_error(node, f"more than {MOST_VALUES} values once its aliases are put in")
        return size

    def _build_error(self, node: yaml.Node, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: line {node.start_mark.line + 1}: {what}")


def _list_children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def validate(model: type[Model], content: dict[str, Any], where: str) -> Model:
    """content as a typed model. Raises ConfigError listing every fault at once."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False)
        faults = [_explain(model, fault) for fault in found[:MOST_FAULTS]]
        if len(found) > MOST_FAULTS:
            faults.append(f"and {len(found) - MOST_FAULTS} more faults")
        raise ConfigError("\n".join(f"{where}: {fault}" for fault in faults)) from None


def name_only(value: Any) -> Any:
    """A mapping {"name": value} for a block that was given as a name alone; any other value unchanged."""
    return {"name": value} if isinstance(value, str) else value


def resolve_path(folder: Path, where: str) -> str:
    """Absolute path of `where`: from folder if it exists there, else from the working folder.

    Raises ConfigError for a path that no disk can have.
    """
    path = folder / where
    try:
        return str((path if path.exists() else Path.cwd() / where).resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"path: found {clean_text(repr(where))}, which cannot be one ({error!r:.80})"
        ) from error


def require_usable_path(path: Path) -> Path:
    """Return path. Raises ValueError when no disk can have it. A validator for settings."""
    parts = [len(os.fsencode(part)) for part in path.parts]
    if "\0" in str(path) or max(parts, default=0) > 255 or sum(parts) + len(parts) > 4_000:
        raise ValueError(
            "not a path that a disk can have: a part is longer than 255 bytes, or it is too long"
        )
    return path


UsablePath = Annotated[Path, AfterValidator(require_usable_path)]


def apply_overrides(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """content with each KEY=VALUE applied; KEY is a dotted path, VALUE is YAML.

    A budget of the memory takes the place of the one that is there, and another optimiser does not take the
    rate of the one before, nor that it has no weight decay: a resolved learner names all three, whether or
    not a person did.

    Raises ConfigError naming the first KEY=VALUE that is none.
    """
    result = _copy_deeply(content)
    keys = {override.partition("=")[0].strip() for override in overrides}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"--set {clean_text(repr(override))}: allowed KEY=VALUE, for instance learner.epochs=3"
            )
        node = result
        *parents, last = key.strip().split(".")
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, dict):
                child = node[parent] = {} if child is None else {"name": child}
            node = child
        before, found = node.get(last), _parse(value, f"--set {override!r}")
        node[last] = found
        if parents == ["learner", "memory"] and last in MEMORY_BUDGETS and found is not None:
            for budget in {*MEMORY_BUDGETS} - {last}:
                node.pop(budget, None)
        other = before is not None and str(before).lower() != str(found).lower()
        if other and key.strip() == "learner.optimizer.name":
            _forget_rule(node, keys)
    return result


def _forget_rule(optimizer: dict[str, Any], keys: set[str]) -> None:
    """Remove what belongs to the optimiser before. keys: those that the overrides themselves set."""
    if "learner.optimizer.lr" not in keys:
        optimizer.pop("lr", None)
    if "learner.optimizer.weight_decay" not in keys and not optimizer.get("weight_decay"):
        optimizer.pop("weight_decay", None)


MEMORY_BUDGETS = ("per_class", "fixed_total", "share")
"""Keys of learner.memory, one of which is set."""


def _copy_deeply(value: Any) -> Any:
    return {key: _copy_deeply(item) for key, item in value.items()} if isinstance(value, dict) else value


UNION = ("function-", "lax-or", "json-or", "constrained-", "tuple[", "literal[")
"""First letters of the parts of a place that pydantic adds for the members of a union."""


def _explain(model: type[BaseModel], fault: Any) -> str:
    """One sentence for one pydantic fault."""
    location = [part for part in fault["loc"] if not str(part).startswith(UNION)]
    key = clean_text(".".join(str(part) for part in location)) or "the file"
    found = fault.get("input")
    if fault["type"] == "extra_forbidden":
        allowed = sorted(_list_fields(model, location[:-1]))
        close = _suggest_block(model, location) or suggest_nearest(clean_text(str(location[-1])), allowed)
        return f"unknown key {key!r}{close}; allowed here: {', '.join(allowed)}"
    if fault["type"] == "missing":
        return f"key {key!r} is missing"
    message = clean_text(fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), 2_000)
    if fault["type"] == "model_type":
        message = "allowed a block of keys"
    if isinstance(found, dict | BaseModel):
        return f"{key}: {message}" if location else message
    return f"{key}: found {clean_text(repr(found))}; {message[0].lower()}{message[1:]}"


KNOWN_ELSEWHERE = {
    "clients": "data.sites",
    "num_clients": "data.sites",
    "epsilon": "privacy.noise_multiplier, from which epsilon follows; `perennial init --epsilon` chooses it",
    "local_epochs": "learner.epochs",
    "num_rounds": "tasks.rounds",
}
"""Words of other libraries for settings: word -> the key that has it here."""


def _suggest_block(model: type[BaseModel], location: list[Any]) -> str:
    """Where a key belongs that was written a block too high, or in another library's words; '' if nowhere."""
    key = str(location[-1])
    if key in KNOWN_ELSEWHERE:
        return f" (here: {KNOWN_ELSEWHERE[key]})"
    above = ".".join(str(part) for part in location[:-1])
    for block in sorted(_list_fields(model, location[:-1])):
        if key in _list_fields(model, [*location[:-1], block]) - _list_fields(model, location[:-1]):
            return f" (it belongs to {above}.{block})".replace("to .", "to ")
    return ""


def _list_fields(model: type[BaseModel], location: list[Any]) -> set[str]:
    """Names of the keys allowed at a location: follows field annotations through unions."""
    models: list[type[BaseModel]] = [model]
    for part in location:
        following: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            if field is not None:
                following += _find_models(field.annotation)
        models = following or models
    return {name for candidate in models for name in candidate.model_fields}


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, list, tuple):
        return [model for argument in typing.get_args(annotation) for model in _find_models(argument)]
    return []
