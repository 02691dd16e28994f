"""What an experiment leaves out means what it meant: a default that changes changes published experiments.

A new key needs no line in data/defaults.json before its first release. Whoever changes a default changes it
there too, and says so in CHANGELOG.md.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from perennial.config.experiment import Experiment
from perennial.config.strategies import STRATEGIES
from perennial.foundation import plugins

RECORDED: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "defaults.json").read_text()
)


def of_strategy(name: str) -> dict[str, Any]:
    """Defaults by key, as JSON has them."""
    keys = inspect.signature(plugins.load_ours(STRATEGIES[name])).parameters
    found = {key: one.default for key, one in keys.items() if one.default is not inspect.Parameter.empty}
    return json.loads(json.dumps(found))


@cache
def of_sections() -> dict[str, dict[str, Any]]:
    """Defaults by the class of a section and key, as JSON has them."""
    schema = Experiment.model_json_schema()
    sections = schema["$defs"] | {"Experiment": schema}
    return {
        name: {key: one["default"] for key, one in section["properties"].items() if "default" in one}
        for name, section in sections.items()
        if "properties" in section
    }


@pytest.mark.parametrize("name", sorted(RECORDED["strategies"]))
def test_keys_of_a_strategy_keep_their_defaults(name: str) -> None:
    recorded = RECORDED["strategies"][name]
    assert {key: of_strategy(name).get(key) for key in recorded} == recorded


@pytest.mark.parametrize("name", sorted(RECORDED["sections"]))
def test_keys_of_a_section_keep_their_defaults(name: str) -> None:
    recorded = RECORDED["sections"][name]
    assert {key: of_sections().get(name, {}).get(key) for key in recorded} == recorded
