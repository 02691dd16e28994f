"""The names of strategies, sources, models and losses that an experiment may use, ours and plug-ins'."""

from collections.abc import Callable, Mapping
from typing import Any

from perennial.config.learner import CLASSIFICATIONS
from perennial.data.source_kinds import SOURCES
from perennial.foundation import plugins
from perennial.models.config import NETWORKS

STRATEGIES = {
    "digest_synthesis": "perennial.strategies.digest_synthesis:DigestSynthesis",
    "clustered_personalisation": "perennial.strategies.clustered_personalisation:ClusteredPersonalisation",
    "fedper": "perennial.strategies.fedper:FedPer",
    "pfa": "perennial.baselines.pfa:PFA",
    "analytic": "perennial.strategies.analytic:Analytic",
    "median": "perennial.strategies.median:Median",
    "trimmed_mean": "perennial.strategies.trimmed_mean:TrimmedMean",
    "krum": "perennial.strategies.krum:Krum",
    "geometric_median": "perennial.strategies.geometric_median:GeometricMedian",
    "bucketing": "perennial.strategies.bucketing:Bucketing",
    "centred_clipping": "perennial.strategies.centred_clipping:CentredClipping",
    "fedavg": "perennial.strategies.fedavg:FedAvg",
    "adabest": "perennial.baselines.adabest:AdaBest",
    "cyclic_weight_transfer": "perennial.baselines.cyclic_weight_transfer:CyclicWeightTransfer",
    "feddisco": "perennial.baselines.feddisco:FedDisco",
    "feddyn": "perennial.strategies.feddyn:FedDyn",
    "fednova": "perennial.strategies.fednova:FedNova",
    "scaffold": "perennial.strategies.scaffold:Scaffold",
    "glfc": "perennial.baselines.glfc:Glfc",
    "target": "perennial.baselines.target:Target",
    "splitfed": "perennial.baselines.splitfed:SplitFed",
    "parallel_rings": "perennial.baselines.parallel_rings:ParallelRings",
    "serial_ring": "perennial.strategies.serial_ring:SerialRing",
    "class_weighted_head": "perennial.strategies.class_weighted_head:ClassWeightedHead",
    "contribution": "perennial.strategies.contribution:Contribution",
    "own_heads": "perennial.strategies.own_heads:OwnHeads",
    "layer_attention": "perennial.strategies.layer_attention:LayerAttention",
    "uniform_mean": "perennial.strategies.uniform_mean:UniformMean",
    "multi_factor": "perennial.strategies.multi_factor:MultiFactor",
}


def with_targets(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """An experiment's content with other people's methods as `module:Class`, and the SHA-256 of each.

    The hash is of the method's source. Written so, the resolved experiment means the same where the package's
    entry points are unknown, as inside a FAB.

    Raises ConfigError when a plug-in is not there.
    """
    found: dict[str, str] = {}

    def named(kind: plugins.Kind, ours: Mapping[str, Any] | tuple[str, ...], name: Any) -> Any:
        if not isinstance(name, str) or name in ours:
            return name
        target = plugins.target_of(kind, name)
        if target is not None:
            found[target] = plugins.fingerprint(target)
        return target or name

    def at(section: Any, key: str, of: Callable[[Any], Any]) -> Any:
        return (
            {**section, key: of(section[key])} if isinstance(section, Mapping) and key in section else section
        )

    def strategy(section: Any) -> Any:
        if isinstance(section, str):
            return named("strategy", STRATEGIES, section)
        if not isinstance(section, Mapping):
            return section
        section = at(section, "name", strategy)
        # a strategy inside another one is a section with a name, or a name under `base`
        return {
            key: strategy(value)
            if key == "base" or (isinstance(value, Mapping) and "name" in value)
            else value
            for key, value in section.items()
        }

    def loss(section: Any) -> Any:
        if isinstance(section, Mapping):
            return at(section, "name", loss)
        return named("loss", CLASSIFICATIONS, section)

    result = at(dict(content), "strategy", strategy)
    result = at(result, "data", lambda data: at(data, "source", lambda name: named("source", SOURCES, name)))
    for key in ("name", "backbone"):
        result = at(
            result,
            "model",
            lambda model, key=key: at(model, key, lambda name: named("model", NETWORKS, name)),
        )
    return at(result, "learner", lambda learner: at(learner, "classification", loss)), found
