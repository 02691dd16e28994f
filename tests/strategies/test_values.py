"""What is passed on cannot be changed: only a class that keeps a state in its own methods is open to change.

A value that two places share would otherwise change in one of them because the other changed it, and it
could not be a key.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest
from pydantic import BaseModel

ROOMS = ("learning", "strategies", "baselines", "privacy", "data")


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


SECTIONS = {name_of(found): found for found in classes() if issubclass(found, BaseModel)}


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_of_an_experiment_cannot_be_changed_and_refuses_unknown_keys(name: str) -> None:
    config = SECTIONS[name].model_config
    assert config.get("frozen") and config.get("extra") == "forbid"
