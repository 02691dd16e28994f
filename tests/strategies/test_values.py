"""What is passed on cannot be changed: only a class that keeps a state in its own methods is open to change.

A value that two places share would otherwise change in one of them because the other changed it, and it
could not be a key.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from types import ModuleType

import pytest
from pydantic import BaseModel

ROOMS = ("learning", "strategies", "baselines", "privacy", "data")
FILLED_BY_OTHERS = {
    "perennial.data.folder._Listing",
    "perennial.strategies.round.outcome.RoundOutcome",
    "perennial.strategies.round.context.RoundContext",
}
"""States that others fill in."""


def modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = importlib.import_module(f"perennial.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"perennial.{room}."):
            yield importlib.import_module(found.name)


def classes() -> Iterator[type]:
    for module in modules():
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                yield found


def name_of(found: type) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def keeps_a_state(found: type) -> bool:
    """Whether a method assigns to an attribute of self."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        for node in ast.walk(tree)
    )


RECORDS = {name_of(found): found for found in classes() if dataclasses.is_dataclass(found)}
SECTIONS = {name_of(found): found for found in classes() if issubclass(found, BaseModel)}


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_without_a_state_of_its_own_cannot_be_changed(name: str) -> None:
    record = RECORDS[name]
    if not keeps_a_state(record) and name not in FILLED_BY_OTHERS:
        assert vars(record)["__dataclass_params__"].frozen, f"{name} can be changed, and no method of it does"


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_of_an_experiment_cannot_be_changed_and_refuses_unknown_keys(name: str) -> None:
    config = SECTIONS[name].model_config
    assert config.get("frozen") and config.get("extra") == "forbid"
