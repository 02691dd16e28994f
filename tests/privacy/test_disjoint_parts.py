"""Which parts of the data a ledger may take for disjoint: the tasks of one run, and nothing wider."""

from pathlib import Path

import pytest

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.foundation.errors import PrivacyError
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from tests.privacy.budgets import budget_for

DELTA = 1e-5
MULTIPLIER = 2.0


def ordered(first: int) -> Experiment:
    """Ten tasks of one class of a hospital's table, beginning with another class in each experiment."""
    names = [f"outcome {label}" for label in range(10)]
    order = [names[(first + place) % 10] for place in range(10)]
    return Experiment.model_validate(
        {
            "name": f"order-{first}",
            "data": {"source": "csv", "path": "visits.csv", "classes": names, "sites": 3},
            "tasks": {"count": 10, "rounds": 1, "order": order},
            "model": {"name": "features", "features": [{"name": "random", "width": 8}]},
            "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01},
            "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": MULTIPLIER},
            "evaluation": {"federated": False},
        }
    )


def releases_of_one_class() -> list[Entry]:
    """Class 0 is in task 1 of the first experiment, task 10 of the second, and so on: ten releases of it."""
    return [charges.sums(ordered(first), f"{first:016x}", 1 + (0 - first) % 10) for first in range(10)]


def test_ten_orders_of_one_class_cost_ten_releases(tmp_path: Path) -> None:
    """The attack of the trials: ledger 2.17, truth 8.08."""
    truth = compose(
        [Entry.of_sums(ordered(0).privacy, run="r", experiment="e", recipient="server", task=1)] * 10, DELTA
    )
    ledger = Ledger(tmp_path)
    for entry in releases_of_one_class():
        ledger.charge(entry)
    assert ledger.cost(DELTA).epsilon == pytest.approx(truth.epsilon)
    assert truth.epsilon > 3 * compose(releases_of_one_class()[:1], DELTA).epsilon


def test_the_limit_notices_another_order(tmp_path: Path) -> None:
    limit = budget_for(releases_of_one_class()[:1], DELTA)
    ledger = Ledger(tmp_path)
    first, second = releases_of_one_class()[:2]
    ledger.charge(first, limit)
    with pytest.raises(PrivacyError, match="max_epsilon"):
        ledger.charge(second, limit)
    # tasks of the run that has released already hold other records
    ledger.charge(charges.sums(ordered(0), first.run, 2), limit)


def test_a_run_s_token_is_no_proof_that_the_experiment_is_the_same(tmp_path: Path) -> None:
    """The server draws the token, so two experiments can have one."""
    same_token = [charges.sums(ordered(first), "0" * 16, 1 + first) for first in range(2)]
    assert compose(same_token, DELTA).epsilon == compose([same_token[0]] * 2, DELTA).epsilon


def test_lines_of_the_first_version_count_for_every_record(tmp_path: Path) -> None:
    """They name a task and no run, so nothing says what is disjoint."""

    def old(task: int) -> Entry:
        found = charges.sums(ordered(0), "0" * 16, task)
        return Entry.from_json(found.to_json() | {"part": f"task {task}"})

    assert compose([old(1), old(2)], DELTA).epsilon == compose([old(1)] * 2, DELTA).epsilon
