"""The registry of built-in strategies: by name, where the class is and what it asks of sites.

This is the one place outside `strategies/` and `baselines/` that knows a strategy by its name.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Literal

from pydantic import BaseModel, Field

from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.plain import Block, FiniteBlock

Measurement = Literal[
    "held_out_accuracy", "train_accuracy", "classification_loss", "class_coverage", "label_counts"
]
"""Names of protocol/measurements.py."""
Scalar = str | bool | int | float | None


class Between(FiniteBlock):
    """Numbers from `least` to `most`, both allowed."""

    least: float
    most: float

    def admits(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


class OneOf(Block):
    """The values that a setting may have."""

    values: tuple[Scalar, ...] = Field(min_length=1)

    def admits(self, value: Any) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in self.values)

    def __str__(self) -> str:
        return ", ".join(repr(value) for value in self.values)


class Asks(Block):
    """Everything that requests of a method may ask of a site beside an update of the model.

    site_half: a plug-in has a half that sites run, the attribute `site_half` of its class.
    measurements: figures that a site may be asked to report beside its update.
    settings: dotted key of a request's settings -> values that it may have; None: whatever the site's own
    check of the key admits. A first part that no key has is refused.
    statistics: sums of fixed features in place of training.
    counts_alike: updates are not multiplied by the number of samples.
    clear_uploads: names of what replies carry without noise, beside what is measured.
    single_updates: why the server needs the update of each site in the clear; "": a sum is enough.
    """

    site_half: bool = False
    measurements: tuple[Measurement, ...] = ()
    settings: dict[str, Between | OneOf | None] = Field(default_factory=dict)
    statistics: bool = False
    counts_alike: bool = False
    clear_uploads: tuple[str, ...] = ()
    single_updates: str = "it needs the update of each site in the clear"

    def check_settings(self, content: dict[str, Any]) -> None:
        """Raises PolicyRefusal naming the first key of a request's settings whose value is not allowed."""
        for key, allowed in self.settings.items():
            value: Any = content
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if allowed is not None and value is not None and not allowed.admits(value):
                raise PolicyRefusal(
                    f"settings.{key}: found {value!r:.40}, in the approved experiment {allowed}"
                )

    @property
    def setting_keys(self) -> frozenset[str]:
        """First parts of the dotted keys that a request's settings may have."""
        return frozenset(key.partition(".")[0] for key in self.settings)


_CLUSTERED = "perennial.strategies.clustered_personalisation."
STRATEGIES = {
    "digest_synthesis": "perennial.strategies.digest_synthesis.method:DigestSynthesis",
    "clustered_personalisation": f"{_CLUSTERED}method:ClusteredPersonalisation",
    "fedper": f"{_CLUSTERED}method:FedPer",
    "pfa": "perennial.baselines.pfa:PFA",
    "analytic": "perennial.strategies.analytic.method:Analytic",
    "median": "perennial.strategies.krum:Median",
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
    "pfa": f"{_CLUSTERED}site:PFASite",
    "analytic": "perennial.strategies.analytic.site:SumsSite",
    "adabest": "perennial.baselines.adabest:AdaBestSite",
    "feddyn": "perennial.strategies.feddyn:FedDynSite",
    "fedprox": "perennial.strategies.server_optimisers:FedProxSite",
    "scaffold": "perennial.strategies.scaffold:ScaffoldSite",
    "target": "perennial.baselines.target:TargetSite",
    "serial_ring": "perennial.strategies.serial_ring.site:RingSite",
    "contribution": "perennial.strategies.site_utility:JudgingSite",
}
"""Where the site half of a strategy is; a strategy that is not here has none."""

_HANDED_ON = "each turn hands a single site's model on"
_IN_CLUSTERS = "clusters are formed from single sites' vectors"


def _build_correction(name: str) -> dict[str, Between | OneOf | None]:
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
    "scaffold": Asks(settings=_build_correction("scaffold"), clear_uploads=("steps",)),
    "feddyn": Asks(settings=_build_correction("feddyn")),
    "adabest": Asks(settings=_build_correction("adabest")),
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


def find_weight_measurements(keys: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """The measurements that multi_factor's weights use. keys: its section of an experiment."""
    named: dict[str, Measurement | None] = {
        "beta": "class_coverage" if keys.get("timeliness") == "coverage" else None,
        "gamma": "train_accuracy" if keys.get("quality") == "train" else "held_out_accuracy",
        "delta": "classification_loss",
    }
    return tuple(measured for key, measured in named.items() if measured and keys.get(key))


def find_asks(name: str, keys: Mapping[str, Any]) -> Asks:
    """What the strategy of this name asks of sites.

    keys: its section of an experiment; a plug-in's asks are written there. Raises ValueError (pydantic's) if
    these are not valid.
    """
    if name == "multi_factor":
        # a site that is asked for more would answer what no weight needs
        return ASKS[name].model_copy(update={"measurements": find_weight_measurements(keys)})
    if name in STRATEGIES:
        return ASKS.get(name, Asks())
    # masked sums know the weights of our own strategies alone, whatever class a plug-in was made from
    return Asks.model_validate({**keys.get("asks", {}), "single_updates": Asks().single_updates})


def list_nested(name: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, own keys) of a strategy and of each that it wraps, from the outside in."""
    while True:
        base = keys.get("base")
        yield name, keys
        if base is None:
            return
        section = {"name": base} if isinstance(base, str) else dict(base)
        name, keys = section.pop("name"), section


DEFAULT_SHRINKAGE: Mapping[str, float | str] = {
    "gaussian": 0.1,
    "ridge": "gcv",
    "balanced_ridge": "validation",
    "auto": "validation",
}
"""By head. Cross-validation counts samples: of classes of very different size it shrinks too little."""
GAMMAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
LAMBDAS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 2.0, 4.0)
"""Shrinkages that are tried if the experiment lists none."""
MOST_CANDIDATES = 60
"""Heads that `head: auto` compares at most."""
HEADS_OF_A_MAP = 15
"""Heads of one map alone or of several together that `head: auto` compares."""


def count_compared_heads(keys: Mapping[str, Any] | None) -> int:
    """Most heads that sites compare in a round. keys: of the strategy with sums; None: there is none."""
    if keys is not None and keys.get("head") == "auto":
        return MOST_CANDIDATES
    if keys is None or find_shrinkage(keys) != "validation":
        return 0
    tried = GAMMAS if (keys.get("head") or "gaussian") == "gaussian" else LAMBDAS
    return len(keys.get("shrinkages") or tried)


def explain_uncovered(keys: Mapping[str, Any]) -> str:
    """Why no accountant covers what this head asks of sites under privacy; "" if one does.

    keys: of the strategy with sums.
    """
    head = keys.get("head") or "gaussian"
    if head == "balanced_ridge":
        return (
            "strategy.head: found 'balanced_ridge' with privacy; no bound on how much one sample moves "
            "weighted sums has been worked out; allowed: gaussian, ridge"
        )
    if find_shrinkage(keys) == "validation":
        found = "strategy.head: found 'auto'" if head == "auto" else "strategy.shrinkage: found 'validation'"
        return (
            f"{found} with privacy, where the counts of validation samples that choose would be a release "
            "of their own, exact and without a charge; allowed: head gaussian, or ridge with a number"
        )
    return ""


def find_shrinkage(keys: Mapping[str, Any]) -> float | str:
    """The shrinkage in keys, a number or "gcv" or "validation"; the head's default if keys have none."""
    given = keys.get("shrinkage")
    return DEFAULT_SHRINKAGE[keys.get("head") or "gaussian"] if given is None else given


def hash_solver_settings(strategy: BaseModel, bounds: BaseModel) -> str:
    """SHA-256 of the settings that turn sums into a head: an experiment's blocks `strategy` and `bounds`.

    A site signs it with its sums, so that an operator cannot solve them by other settings and say that the
    sites agreed.
    """
    content = {"strategy": strategy.model_dump(mode="json"), "bounds": bounds.model_dump(mode="json")}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
