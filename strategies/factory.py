"""Strategies by name, built from the experiment's `strategy:` section with its keys checked.

A strategy's keys are the keywords of its constructor. A keyword annotated as IncrementalStrategy takes a
nested section, so that strategies compose: `strategy: {name: digest_synthesis, base: {name:
layer_attention}}`.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from perennial.foundation.errors import ConfigError, nearest
from perennial.strategies.base import IncrementalStrategy

STRATEGIES = {
    "digest_synthesis": "perennial.strategies.digest_synthesis:DigestSynthesis",
    "clustered_personalisation": "perennial.strategies.clustered_personalisation:ClusteredPersonalisation",
    "fedper": "perennial.strategies.fedper:FedPer",
    "pfa": "perennial.strategies.pfa:PFA",
    "fedavg": "perennial.strategies.fedavg:FedAvg",
    "median": "perennial.strategies.median:Median",
    "trimmed_mean": "perennial.strategies.trimmed_mean:TrimmedMean",
    "krum": "perennial.strategies.krum:Krum",
    "geometric_median": "perennial.strategies.geometric_median:GeometricMedian",
    "bucketing": "perennial.strategies.bucketing:Bucketing",
    "centred_clipping": "perennial.strategies.centred_clipping:CentredClipping",
    "adabest": "perennial.strategies.adabest:AdaBest",
    "cyclic_weight_transfer": "perennial.strategies.cyclic_weight_transfer:CyclicWeightTransfer",
    "feddisco": "perennial.strategies.feddisco:FedDisco",
    "feddyn": "perennial.strategies.feddyn:FedDyn",
    "fednova": "perennial.strategies.fednova:FedNova",
    "scaffold": "perennial.strategies.scaffold:Scaffold",
    "glfc": "perennial.strategies.glfc:Glfc",
    "target": "perennial.strategies.target:Target",
    "splitfed": "perennial.strategies.splitfed:SplitFed",
    "serial_ring": "perennial.strategies.serial_ring:SerialRing",
    "contribution": "perennial.strategies.contribution:Contribution",
    "layer_attention": "perennial.strategies.layer_attention:LayerAttention",
    "uniform_mean": "perennial.strategies.uniform_mean:UniformMean",
    "multi_factor": "perennial.strategies.multi_factor:MultiFactor",
}


def build_strategy(name: str, parameters: Mapping[str, Any], where: str = "strategy") -> IncrementalStrategy:
    """The strategy `name` with its keys. Raises ConfigError naming the key, what was found and what is
    allowed."""
    if name not in STRATEGIES:
        raise ConfigError(
            f"{where}.name: found {name!r}{nearest(name, STRATEGIES)}; "
            f"allowed: {', '.join(sorted(STRATEGIES))}"
        )
    module, _, attribute = STRATEGIES[name].partition(":")
    strategy: type[IncrementalStrategy] = getattr(import_module(module), attribute)
    hints = get_type_hints(strategy.__init__)
    keywords = {
        key: keyword
        for key, keyword in inspect.signature(strategy).parameters.items()
        if keyword.kind is not inspect.Parameter.VAR_KEYWORD
    }
    values: dict[str, Any] = {}
    for key, value in parameters.items():
        if key not in keywords:
            allowed = ", ".join(keywords)
            raise ConfigError(
                f"{where}: unknown key {key!r}{nearest(key, keywords)}; {name} takes: {allowed}"
            )
        values[key] = _checked(f"{where}.{key}", hints[key], value)
    missing = [
        key
        for key, keyword in keywords.items()
        if keyword.default is inspect.Parameter.empty and key not in values
    ]
    if missing:
        raise ConfigError(f"{where}: {name} needs {', '.join(missing)}")
    try:
        return strategy(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error


def _checked(where: str, hint: Any, value: Any) -> Any:
    if inspect.isclass(hint) and issubclass(hint, IncrementalStrategy):
        section = {"name": value} if isinstance(value, str) else value
        if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
            raise ConfigError(
                f"{where}: found {value!r}, allowed a strategy: a name, or a mapping with `name`"
            )
        return build_strategy(section["name"], {k: v for k, v in section.items() if k != "name"}, where)
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=False)).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(f"{where}: found {value!r}; {fault['msg'][0].lower()}{fault['msg'][1:]}") from None
