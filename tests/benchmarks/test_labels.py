"""The label of each row of every table says what its resolved experiment has, and differs in."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.table import tables
from perennial.config.experiment import Experiment

Holds = Callable[[Experiment, str], bool]


def chain(experiment: Experiment) -> list[dict[str, Any]]:
    """The strategy and what it wraps, outermost first."""
    found, inner = [], experiment.model_dump(mode="json")["strategy"]
    while inner:
        inner = inner if isinstance(inner, dict) else {"name": inner}
        found.append(inner)
        inner = inner.get("base")
    return found


def has_strategy(experiment: Experiment, name: str) -> bool:
    return any(each["name"] == name for each in chain(experiment))


def is_plain(experiment: Experiment) -> bool:
    """Exemplars, one network, and averaging by size: no other term, no other weights."""
    learner = experiment.learner
    terms = (learner.distillation, learner.contrastive, learner.consolidation)
    weights = chain(experiment)[-1]
    by_size = weights["name"] == "fedavg" or (
        weights["name"] == "multi_factor" and not any(weights.get(key) for key in ("beta", "gamma", "delta"))
    )
    one_network = experiment.model.name not in ("dual_backbone", "digest_two_branch")
    return learner.memory is not None and not any(terms) and by_size and one_network


def loss(experiment: Experiment) -> str:
    return experiment.learner.classification.name


def alpha(experiment: Experiment) -> float | None:
    return getattr(experiment.data.partition, "alpha", None)


def noise(experiment: Experiment) -> float | None:
    return getattr(experiment.privacy, "noise_multiplier", None)


# a pooled or single site of a federation is one
WORDS: dict[str, Holds] = {
    r"(?<![-\d])(\d+) tasks\b": lambda e, found: e.tasks.count == int(found),
    r"(?<![-\d])(\d+) sites\b": lambda e, found: e.data.sites in (int(found), 1),
    r"Dirichlet ([\d.]+)\b": lambda e, found: alpha(e) == float(found),
    r"(\d+) local epochs": lambda e, found: e.learner.epochs == int(found),
    r"(\d+) segments?": lambda e, found: any(each.get("segments") == int(found) for each in chain(e)),
    r"(plain SGD)$": lambda e, _: e.learner.optimizer.name == "sgd" and not e.learner.optimizer.momentum,
    r"(?:^|: )(plain replay)\b": lambda e, _: is_plain(e),
    r"(exemplars and cross entropy alone)": lambda e, _: is_plain(e) and loss(e) == "ce",
    r"(balanced softmax alone|plain replay, balanced softmax)": lambda e, _: (
        is_plain(e) and loss(e) == "balanced_softmax"
    ),
    r"(?:^|: )(full system)$": lambda e, _: bool(
        e.model.name == "dual_backbone"
        and has_strategy(e, "multi_factor")
        and e.learner.distillation
        and e.learner.contrastive
    ),
    r"(fine-tuning)$": lambda e, _: e.learner.memory is None,
    r"(?:sigma|noise multiplier) ([\d.]+)$": lambda e, found: noise(e) == float(found),
    r"(no protection)$": lambda e, _: not noise(e),
    r"(?:^|: )(FedAvg)(?=$|,)": lambda e, _: chain(e)[-1]["name"] == "fedavg",
    r"(?:^|: )(FedProx)\b": lambda e, _: getattr(e.learner.correction, "name", "") == "fedprox",
    r"(?:^|: )(SCAFFOLD)\b": lambda e, _: has_strategy(e, "scaffold"),
    r"(?:^|: )(ring)\b": lambda e, _: has_strategy(e, "serial_ring"),
}
"""What a label can say -> whether an experiment has it, given the group."""


@pytest.mark.parametrize("name", sorted(tables()))
def test_labels_say_what_experiments_have(name: str) -> None:
    wrong = []
    for row in tables()[name].rows:
        said = {
            (words, found.group(1)) for words in WORDS for found in re.finditer(words, row.label.rstrip("."))
        }
        if said:
            experiment = row.load(1)
            wrong += [f"{row.label}: {found}" for words, found in said if not WORDS[words](experiment, found)]
    assert not wrong
