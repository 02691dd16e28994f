"""Keys of experiment.yaml and site.yaml that earlier releases had.

An experiment that 0.2.0 stored has every default written out. So a key that is gone is accepted at its
default, with a note. Any other value asked for something that this release cannot do, and is refused.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_log = logging.getLogger("perennial.config")


class Removed(NamedTuple):
    """A key that is gone. default: its value where nobody set it. instead: what replaces it."""

    default: Any
    instead: str


EXPERIMENT: dict[str, Removed] = {
    "rounds.asynchronous": Removed(False, "Sites that were away send what is missing at their return."),
    "stopping": Removed(None, "Set the number of rounds by `tasks.rounds`; each task keeps its last model."),
    "digests.kind": Removed("mixtures", "Digests are mixtures; `digests.protection: gauss` hides a sample."),
    "privacy.noise_source": Removed("secure", "Noise comes from the system's secure source alone."),
    "privacy.allow_unaccounted_metrics": Removed(False, "A private run sends nothing that is not charged."),
    "privacy.ghost": Removed(False, "Gradients are clipped one by one; use a smaller model or patch."),
    "privacy.physical_batch": Removed(None, "A batch is taken in parts of 4096 samples."),
    "privacy.adaptive_clipping": Removed(None, "The clip norm is privacy.clip_norm in every round."),
    "secure.largest_drop": Removed(None, "Under masks no round is halved; choose bounds that hold."),
    "bounds.max_samples": Removed(1 << 20, "Nobody counts as more than 1048576 samples."),
    "bounds.on_norm": Removed(
        "scale", "Updates are scaled down, and dropped where a method cannot scale them."
    ),
    "bounds.window": Removed(10, "The last 10 rounds count."),
    "sums": Removed({"bits": 64, "largest_norm": 1024.0}, "Sums have 64 bits and room for norms of 1024."),
    "digests.noise_source": Removed("secure", "Noise comes from the system's secure source alone."),
    "tasks.base_classes": Removed(0, "Write the first task's size into `increments: [50, 10, ...]`."),
    "rounds.join_timeout": Removed(600.0, "`rounds.deadline` is also how long the server waits for sites."),
    "learner.classification.temperatures": Removed([0.9, 1.1], "The values are those of the paper."),
    "learner.classification.weights": Removed([1.1, 0.9], "The values are those of the paper."),
    "learner.distillation.teacher": Removed("full", "The teacher is the whole model of the task before."),
    "learner.means": Removed("site", "Class means are those of a site's own exemplars."),
    "learner.shrinkage": Removed(0.1, "The discriminants of features that learn on shrink by 0.1."),
    "learner.freeze_after": Removed(None, "A frozen network is a map of `features`, for strategy analytic."),
    "model.expansion": Removed(None, "`features: [random]` maps the inputs themselves."),
    "model.trained_blocks": Removed("all", "A frozen network is a map of `features`."),
    "model.pretrained": Removed(None, "Give the network as the one map in `features`."),
    "digests.encoder": Removed(
        {"name": "random", "file": None, "sha256": None},
        "The encoder is random and drawn from the seed (docs/methods/feddig.md).",
    ),
    "data.pool": Removed(None, "Each image is a record; `data.patient` keeps those of a patient together."),
    "data.encoding": Removed(None, "Files are read as UTF-8, UTF-16 or Windows-1252; save others as UTF-8."),
    "data.partition.ratios": Removed(None, "Kind dirichlet gives sites of uneven size."),
    "data.partition.balance": Removed(False, "A site that has its equal share may get more."),
    "digests.labels": Removed("public", "`digests.label_epsilon` alone has labels answered at random."),
    "digests.weight_alpha": Removed(None, "The samples of a digest count alike."),
    "data.frame": Removed(
        None, "A file with several frames is refused: write the one that is the image by itself."
    ),
    "digests.weights": Removed(None, "The samples of a digest count alike."),
    "digests.delta": Removed(1e-5, "The delta of protection gauss is 1e-5."),
    "digests.sample_constant": Removed(20000, "`protection: paper` takes the paper's own number."),
}
"""Dotted path in experiment.yaml -> what became of it. A whole section's default is a mapping."""

STRATEGIES: dict[tuple[str, str], Removed] = {
    ("digest_synthesis", "held_out"): Removed(0, "Set the number of rounds by `tasks.rounds`."),
    ("serial_ring", "feature_clip"): Removed(None, "No account covers noise on features."),
    ("serial_ring", "feature_noise"): Removed(None, "No account covers noise on features."),
    ("serial_ring", "stratify"): Removed(False, "Segments are drawn from all of a site's samples."),
    ("layer_attention", "granularity"): Removed("tensor", "Each tensor has a weight of its own."),
    ("layer_attention", "times_samples"): Removed(False, "`multi_factor` weighs by samples."),
    ("fedadam", "beta_1"): Removed(0.9, "The value is 0.9."),
    ("fedadam", "beta_2"): Removed(0.99, "The value is 0.99."),
    ("fedyogi", "beta_1"): Removed(0.9, "The value is 0.9."),
    ("fedyogi", "beta_2"): Removed(0.99, "The value is 0.99."),
    ("fedadagrad", "beta_1"): Removed(0.0, "There is no momentum, as published."),
    ("contribution", "estimator"): Removed("online", "Each sweep of a ring is one permutation of the sites."),
    ("contribution", "exact"): Removed(False, "Each sweep of a ring is one permutation of the sites."),
    ("contribution", "permutations"): Removed(None, "Each sweep of a ring is one permutation of the sites."),
    ("*", "max_update_norm"): Removed(None, "Use `bounds.norm_multiple`."),
    ("multi_factor", "staleness"): Removed(2, "A reply may be 2 rounds late."),
    ("analytic", "prior"): Removed(0.0, "Classes weigh equally in a Gaussian head."),
    ("multi_factor", "kappa"): Removed(0.5, "Recency is exp(-0.5 rounds late)."),
    ("clustered_personalisation", "sparsity_delta"): Removed(1e-5, "The noise has delta 1e-5."),
    ("pfa", "sparsity_delta"): Removed(1e-5, "The noise has delta 1e-5."),
    ("digest_synthesis", "weights"): Removed("uniform", "Every site counts alike, absent or not."),
    ("digest_synthesis", "recall_epochs"): Removed(1, "Digests are recalled once."),
    ("serial_ring", "link"): Removed(None, "The summary counts bytes; divide them by the link's rate."),
    ("clustered_personalisation", "batch_norm"): Removed("shared", "Name the layers in `personal`."),
    ("clustered_personalisation", "channel_choice"): Removed("seeded", "`channels` are drawn by the seed."),
    ("clustered_personalisation", "extractor"): Removed("global", "Vectors are of the global model."),
    ("clustered_personalisation", "standardise"): Removed(False, "Vectors are compared as they are."),
    ("layer_attention", "order"): Removed(2.0, "Distances are L2 norms."),
    ("layer_attention", "temperature"): Removed(1.0, "Use `scale: mean`."),
    ("multi_factor", "max_weight"): Removed(0.5, "No site counts for more than half."),
    ("serial_ring", "sizes"): Removed("variable", "Segments have drawn sizes."),
    ("serial_ring", "least_segment"): Removed(None, "A segment has 32 samples, if the site has enough."),
    ("serial_ring", "freeze"): Removed(0, "A frozen network is a map of `features`."),
    ("serial_ring", "init_noise_layers"): Removed(0.5, "Half of the layers get noise."),
    ("feddisco", "a"): Removed(0.5, "The value is that of the paper."),
    ("feddisco", "b"): Removed(0.1, "The value is that of the paper."),
    ("target", "temperature"): Removed(2.0, "The value is 2."),
    ("contribution", "held_out"): Removed(None, "The server's samples judge, or else the sites'."),
    ("contribution", "samples"): Removed(200, "The value is 200."),
    ("fedper", "global_rounds"): Removed(0, "Use clustered_personalisation with `clusters: 1`."),
    ("analytic", "criterion"): Removed("balanced", "Validation samples judge by the mean over classes."),
}
"""(strategy, its key) -> what became of it, for a strategy alone and for one that is the base of another."""

_BY_APPROVAL = "The approved experiment fixes it; `perennial site review` shows it before the approval."
_FIXED = "The limit is the same at every site."
SITE: dict[str, Removed] = {
    "policy.max_epochs": Removed(20, _BY_APPROVAL),
    "policy.max_steps": Removed(20_000, _BY_APPROVAL),
    "policy.max_rounds": Removed(2_000, _BY_APPROVAL),
    "policy.max_clip_norm": Removed(10, _BY_APPROVAL),
    "policy.min_noise_multiplier": Removed(0.5, _BY_APPROVAL),
    "policy.max_repeats": Removed(3, _FIXED),
    "policy.max_seconds": Removed(3600, _FIXED),
    "policy.max_bytes": Removed(2**30, _FIXED),
    "connection.flower_home": Removed("flower", "Flower's folder is `flower` beside site.yaml."),
    "state.gigabytes_per_run": Removed(8, "A run takes at most a quarter of `state.gigabytes`."),
    "state.features_gigabytes": Removed(16, "Features take at most half of `state.gigabytes`."),
    "connection.any_app": Removed(False, "A site runs what it approved: `perennial site approve`."),
    "connection.trusted_entities": Removed(
        None, "An app carries no code, so nobody's signature lets one in."
    ),
    "other_code": Removed([], "An app carries no code; install code as a plug-in (`plugins`)."),
    "data.frame": Removed(
        None, "A file with several frames is refused: write the one that is the image by itself."
    ),
    "receipts": Removed(None, "ledger_tip, a file outside state_dir that every site has by default"),
}
"""Dotted path in site.yaml -> what became of it."""


def drop_removed_from_experiment(content: Any) -> Any:
    """Return an experiment's content without the keys that are gone.

    Raises:
        ValueError: a key that is gone has another value than its default.
    """
    if not isinstance(content, Mapping):
        return content
    dropped: list[str] = []
    found = _drop(content, EXPERIMENT, dropped)
    if isinstance(found.get("strategy"), Mapping):
        found["strategy"] = _drop_from_strategy(found["strategy"], "strategy", dropped)
    _tell("experiment", dropped)
    return found


def drop_removed_from_site(content: Any) -> Any:
    """Return the content of site.yaml without the keys that are gone.

    Raises:
        ValueError: a key that is gone has another value than its default.
    """
    if not isinstance(content, Mapping):
        return content
    dropped: list[str] = []
    found = _drop(content, SITE, dropped)
    _tell("site", dropped)
    return found


def _drop(content: Mapping[str, Any], removed: Mapping[str, Removed], dropped: list[str]) -> dict[str, Any]:
    found = dict(content)
    for path, key in removed.items():
        *sections, last = path.split(".")
        holder: Any = found
        for section in sections:
            inner = holder.get(section) if isinstance(holder, dict) else None
            if not isinstance(inner, Mapping):
                holder = None
                break
            # copied on the way: the caller's mapping stays as it is
            holder[section] = dict(inner)
            holder = holder[section]
        if isinstance(holder, dict) and last in holder:
            _require_default(path, holder.pop(last), key)
            dropped.append(path)
    return found


def _drop_from_strategy(section: Mapping[str, Any], path: str, dropped: list[str]) -> dict[str, Any]:
    found = dict(section)
    for (name, key), removed in STRATEGIES.items():
        if name in ("*", found.get("name")) and key in found:
            _require_default(f"{path}.{key}", found.pop(key), removed)
            dropped.append(f"{path}.{key}")
    if isinstance(found.get("base"), Mapping):
        found["base"] = _drop_from_strategy(found["base"], f"{path}.base", dropped)
    return found


def _require_default(path: str, value: Any, removed: Removed) -> None:
    for where, found, default in _find_differences(path, value, removed.default):
        raise ValueError(
            f"{where}: found {found!r}, allowed {default!r} alone, the former default of a key that is gone. "
            f"{removed.instead}"
        )


def _find_differences(path: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, str) and isinstance(default, Mapping):
        value = {"name": value}
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        for key, inner in value.items():
            yield from _find_differences(f"{path}.{key}", inner, default.get(key))
    elif value != default:
        yield path, value, default


def _tell(where: str, dropped: list[str]) -> None:
    if dropped:
        _log.warning(
            "%s: keys that this release no longer has, at their defaults: %s", where, ", ".join(dropped)
        )
