"""Which settings noised sums get, and that the committed trial supports them."""

import pytest

from perennial.cli.init_private import MEANS_ALONE, choose_private_sums
from perennial.config.experiment import Experiment
from perennial.privacy.accountants import make_accountant


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (13,)])
@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_they_make_an_experiment_that_costs_what_was_asked(shape: tuple[int, ...], epsilon: float) -> None:
    found = choose_private_sums(shape, 2000, 5, epsilon, sites=4, tasks=2)
    experiment = Experiment.model_validate(
        {
            "name": "asked",
            "data": {"source": "digits", "sites": 4},
            "tasks": {"count": 2, "rounds": 1},
            "model": found.model,
            "strategy": found.strategy,
            "privacy": found.privacy,
            "evaluation": {"federated": False},
        }
    )
    multiplier = experiment.privacy.noise_multiplier
    assert multiplier is not None
    assert 0.97 * epsilon <= make_accountant("rdp", [(multiplier, 1.0, 1)]).epsilon(1e-5) <= epsilon
    assert len(found.reasons) >= 2


def test_more_records_bear_products_and_more_components() -> None:
    few, many = (choose_private_sums((3, 32, 32), count, 7, 2.0, sites=4) for count in (300, 50_000))
    assert few.privacy["blocks"] == list(MEANS_ALONE) and "blocks" not in many.privacy
    assert few.model["projection"] < many.model["projection"]
    # one noise in all bears more than four
    assert choose_private_sums((8,), 1500, 7, 2.0, sites=4).privacy.get("blocks")
    assert not choose_private_sums((8,), 1500, 7, 2.0, sites=1).privacy.get("blocks")
