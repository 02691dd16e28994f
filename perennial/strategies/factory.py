"""Strategies by name, built from the experiment's `strategy:` section with its keys checked.

A strategy's keys are the keywords of its constructor. A keyword annotated as IncrementalStrategy takes a
nested section, so that strategies compose: `strategy: {name: digest_synthesis, base: {name:
layer_attention}}`. A name that is not ours is looked up among plug-ins (foundation/plugins.py).
"""

import inspect
from collections.abc import Mapping
from typing import Any

from perennial.config.strategies import REMOVED, STRATEGIES
from perennial.foundation import keywords, plugins
from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy

__all__ = ["STRATEGIES", "build_strategy"]


def build_strategy(name: str, parameters: Mapping[str, Any], where: str = "strategy") -> IncrementalStrategy:
    """Build the strategy of that name with its keys.

    Raises ConfigError naming the key, what was found and what is allowed.
    """
    if name in STRATEGIES:
        strategy = plugins.load_ours(STRATEGIES[name])
    elif name in REMOVED:
        raise ConfigError(f"{where}.name: found {name!r}, which is no strategy here; {REMOVED[name]}")
    elif plugins.find_target("strategy", name) is None:
        raise plugins.refuse_unknown("strategy", name, STRATEGIES, f"{where}.name")
    else:
        strategy = plugins.load("strategy", name, f"{where}.name")
        # what a plug-in asks of sites stands beside its keys, for the sites
        parameters = {key: value for key, value in parameters.items() if key != "asks"}
    if not inspect.isclass(strategy) or not issubclass(strategy, IncrementalStrategy):
        raise ConfigError(
            f"{where}.name: {name} is no strategy; allowed: a subclass of "
            "perennial.strategies.base.IncrementalStrategy"
        )
    made = keywords.build(strategy, name, parameters, where, convert=_convert)
    if not hasattr(made, "exchange"):
        raise ConfigError(f"{where}.name: {name}: its __init__ has to call super().__init__() first")
    return made


def _convert(where: str, hint: Any, value: Any) -> Any:
    if not (inspect.isclass(hint) and issubclass(hint, IncrementalStrategy)):
        return keywords.convert_value(where, hint, value)
    section = {"name": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(f"{where}: found {value!r}, allowed a strategy: a name, or a mapping with `name`")
    return build_strategy(section["name"], {k: v for k, v in section.items() if k != "name"}, where)
