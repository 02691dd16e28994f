"""The registry of built-in strategies: by name, where the class is and what it asks of sites.

This is the one place outside `strategies/` and `baselines/` that knows a strategy by its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from perennial.config.asks import Asks, Between, OneOf

_CLUSTERED = "perennial.strategies.clustered_personalisation."
STRATEGIES = {
    "digest_synthesis": "perennial.strategies.digest_synthesis.method:DigestSynthesis",
    "clustered_personalisation": f"{_CLUSTERED}method:ClusteredPersonalisation",
    "fedper": f"{_CLUSTERED}method:FedPer",
    "pfa": "perennial.baselines.pfa:PFA",
    "analytic": "perennial.strategies.analytic.method:Analytic",
    "median": "perennial.strategies.median:Median",
    "fedavg": "perennial.strategies.fedavg:FedAvg",
    "adabest": "perennial.baselines.adabest:AdaBest",
    "cyclic_weight_transfer": "perennial.baselines.cyclic_weight_transfer:CyclicWeightTransfer",
    "feddisco": "perennial.baselines.feddisco:FedDisco",
    "feddyn": "perennial.strategies.feddyn:FedDyn",
    "fedprox": "perennial.strategies.server_optimisers:FedProx",
    "fedavgm": "perennial.strategies.server_optimisers:FedAvgM",
    "fedadam": "perennial.strategies.server_optimisers:FedAdam",
    "fedyogi": "perennial.strategies.server_optimisers:FedYogi",
    "fedadagrad": "perennial.strategies.server_optimisers:FedAdagrad",
    "krum": "perennial.strategies.krum:Krum",
    "multi_krum": "perennial.strategies.krum:MultiKrum",
    "trimmed_mean": "perennial.strategies.krum:TrimmedMean",
    "fednova": "perennial.strategies.fednova:FedNova",
    "scaffold": "perennial.strategies.scaffold:Scaffold",
    "target": "perennial.baselines.target:Target",
    "serial_ring": "perennial.strategies.serial_ring.method:SerialRing",
    "contribution": "perennial.strategies.contribution:Contribution",
    "layer_attention": "perennial.strategies.layer_attention:LayerAttention",
    "uniform_mean": "perennial.strategies.fedavg:UniformMean",
    "multi_factor": "perennial.strategies.multi_factor:MultiFactor",
}
REMOVED = {
    **dict.fromkeys(
        ("bucketing", "centred_clipping", "geometric_median"),
        "use median (docs/robustness.md)",
    ),
    "glfc": "use fedavg, with the two parts of GLFC in `learner` (experiments/glfc_digits.yaml)",
    "splitfed": "version v1 was fedavg; v2 has no successor",
    "parallel_rings": "use serial_ring",
    "class_weighted_head": "use its base alone",
}
"""Strategies of earlier releases, and what replaces each."""

SITE_HALVES = {
    "digest_synthesis": "perennial.strategies.digest_synthesis.site:SummarySite",
    "clustered_personalisation": f"{_CLUSTERED}site:ClusteredSite",
    "fedper": f"{_CLUSTERED}site:PersonalSite",
    "pfa": f"{_CLUSTERED}site:ClusteredSite",
    "analytic": "perennial.strategies.analytic.site:SumsSite",
    "adabest": "perennial.baselines.adabest:AdaBestSite",
    "feddyn": "perennial.strategies.feddyn:FedDynSite",
    "fedprox": "perennial.strategies.server_optimisers:FedProxSite",
    "scaffold": "perennial.strategies.scaffold:ScaffoldSite",
    "target": "perennial.baselines.target:TargetSite",
    "serial_ring": "perennial.strategies.serial_ring.site:RingSite",
    "contribution": "perennial.strategies.valuation.site_utility:JudgingSite",
}
"""Where the site half of a strategy is; a strategy that is not here has none."""

_HANDED_ON = "each turn hands a single site's model on"
_IN_CLUSTERS = "clusters are formed from single sites' vectors"


def _corrected(name: str) -> dict[str, Between | OneOf | None]:
    """The setting by which a site's own half of a method's correction is ordered."""
    return {"correction.name": OneOf(values=(name,))}


ASKS: Mapping[str, Asks] = {
    "fedavg": Asks(single_updates=""),
    "fedprox": Asks(single_updates=""),
    **dict.fromkeys(("fedavgm", "fedadam", "fedyogi", "fedadagrad"), Asks(single_updates="")),
    "uniform_mean": Asks(counts_alike=True, single_updates=""),
    "analytic": Asks(statistics=True, single_updates=""),
    "fednova": Asks(
        clear_uploads=("steps",), single_updates="its weights are normalised by what single sites report"
    ),
    "scaffold": Asks(settings=_corrected("scaffold"), clear_uploads=("steps",)),
    "feddyn": Asks(settings=_corrected("feddyn")),
    "adabest": Asks(settings=_corrected("adabest")),
    "feddisco": Asks(
        measurements=("label_counts",),
        clear_uploads=("label_counts",),
        single_updates="its weights compare the class counts of single sites",
    ),
    "multi_factor": Asks(
        measurements=("class_coverage", "held_out_accuracy", "train_accuracy", "classification_loss"),
        single_updates="its weights compare what single sites report",
    ),
    "layer_attention": Asks(single_updates="attention over layers compares single updates"),
    "contribution": Asks(single_updates="the value of a site is found out from its own update"),
    "digest_synthesis": Asks(single_updates="digests of single sites stand in for them"),
    "clustered_personalisation": Asks(settings={"personal": None}, single_updates=_IN_CLUSTERS),
    "fedper": Asks(settings={"personal": None}),
    "pfa": Asks(settings={"personal": None}),
    "serial_ring": Asks(settings={"turn": None}, single_updates=_HANDED_ON),
    "cyclic_weight_transfer": Asks(single_updates=_HANDED_ON),
}
"""A strategy that is not here asks for nothing beside its updates, each in the clear."""
LOCAL_STEPS: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {"name": "sgd", "momentum": 0.0, "schedule": "constant"},
}
"""What a strategy needs of `learner.optimizer`: its arithmetic counts steps of plain SGD of one size."""


def asks_of(name: str, keys: Mapping[str, Any]) -> Asks:
    """What the strategy of this name asks of sites.

    keys: its section of an experiment; a plug-in's asks are written there. Raises ValueError (pydantic's) if
    these are not valid.
    """
    if name in STRATEGIES:
        return ASKS.get(name, Asks())
    # masked sums know the weights of our own strategies alone, whatever class a plug-in was made from
    return Asks.model_validate({**keys.get("asks", {}), "single_updates": Asks().single_updates})


def nested(name: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, own keys) of a strategy and of each that it wraps, from the outside in."""
    while True:
        base = keys.get("base")
        yield name, keys
        if base is None:
            return
        section = {"name": base} if isinstance(base, str) else dict(base)
        name, keys = section.pop("name"), section
