"""Other people's strategies, sources, models and losses in an experiment, by name."""

from collections.abc import Callable, Mapping
from typing import Any

from perennial.config.learner import CLASSIFICATIONS
from perennial.config.schema import ExperimentFields
from perennial.config.strategies import STRATEGIES, Asks, find_asks, list_nested
from perennial.data.config import SOURCES
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError
from perennial.models.config import NETWORKS

WHERE: Mapping[plugins.Kind, str] = {
    "strategy": "strategy.name",
    "source": "data.source",
    "model": "model.name",
    "loss": "learner.classification.name",
}


def resolve_targets(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(content with plug-ins named `module:Class`, SHA-256 of each plug-in's source by that name).

    So the content means the same where the package's entry points are not installed, as inside a FAB. A
    plug-in strategy's Asks are written beside its name, where sites read them; a target that
    content["plugins"] lists was resolved before, and keeps those written then.
    Raises ConfigError for a plug-in that nobody named.
    """
    found: dict[str, str] = {}
    resolved = content.get("plugins")
    written = resolved if isinstance(resolved, Mapping) else {}

    def resolve_name(kind: plugins.Kind, ours: Mapping[str, Any] | tuple[str, ...], name: Any) -> Any:
        if not isinstance(name, str) or name in ours:
            return name
        target = plugins.find_target(kind, name)
        if target is not None:
            found[target] = plugins.compute_fingerprint(target)
        elif name in written:
            # an experiment that was resolved before is read without its code; what needs the code asks for it
            found[name] = written[name]
        elif plugins.is_target(name) or plugins.is_offered(kind, name):
            raise plugins.refuse_unnamed(kind, name, WHERE[kind])
        return target or name

    def replace_at(section: Any, key: str, of: Callable[[Any], Any]) -> Any:
        return (
            {**section, key: of(section[key])} if isinstance(section, Mapping) and key in section else section
        )

    def resolve_strategy(section: Any) -> Any:
        if isinstance(section, str):
            resolved = resolve_strategy({"name": section})
            # as it was written: what an experiment says is what identifies results of earlier runs
            return section if resolved == {"name": section} else resolved
        if not isinstance(section, Mapping):
            return section
        section = add_asks(
            replace_at(section, "name", lambda name: resolve_name("strategy", STRATEGIES, name))
        )
        # a strategy inside another one is a section with a name, or a name under `base`
        return {
            key: resolve_strategy(value)
            if key == "base" or (isinstance(value, Mapping) and "name" in value)
            else value
            for key, value in section.items()
        }

    def add_asks(section: Mapping[str, Any]) -> Mapping[str, Any]:
        target = section.get("name")
        if not isinstance(target, str) or target not in found or target in written:
            return section
        if "asks" in section:
            raise ConfigError(f"strategy.asks: found with {target}, whose class says what it asks of sites")
        asks = getattr(plugins.load("strategy", target, WHERE["strategy"]), "asks", Asks())
        if not isinstance(asks, Asks):
            raise ConfigError(f"strategy.name: {target}: asks is {asks!r:.80}, allowed Asks(...)")
        return (
            section
            if asks == Asks()
            else {**section, "asks": asks.model_dump(mode="json", exclude_defaults=True)}
        )

    def resolve_loss(section: Any) -> Any:
        if isinstance(section, Mapping):
            return replace_at(section, "name", resolve_loss)
        return resolve_name("loss", CLASSIFICATIONS, section)

    def resolve_network(section: Any) -> Any:
        for key in ("name", "backbone"):
            section = replace_at(section, key, lambda name: resolve_name("model", NETWORKS, name))
        return section

    result = replace_at(dict(content), "strategy", resolve_strategy)
    result = replace_at(
        result,
        "data",
        lambda data: replace_at(data, "source", lambda name: resolve_name("source", SOURCES, name)),
    )
    result = replace_at(result, "model", resolve_network)
    return replace_at(
        result, "learner", lambda learner: replace_at(learner, "classification", resolve_loss)
    ), found


def require_code_of_sites(experiment: ExperimentFields) -> None:
    """Raises ConfigError for a source, network, loss or site half that no plug-in in use has.

    Sites need these. They need no code of a strategy without a site half, which works at the server.
    """
    of = list_nested(experiment.strategy.name, experiment.strategy.parameters)
    network = experiment.model
    named: list[tuple[plugins.Kind, str]] = [
        ("source", experiment.data.source),
        ("loss", experiment.learner.classification.name),
        *(("strategy", name) for name, keys in of if find_asks(name, keys).site_half),
        *(("model", name) for name in (network.name, network.backbone or "")),
    ]
    for kind, name in named:
        if plugins.is_target(name):
            plugins.require_named(kind, name, WHERE[kind])
