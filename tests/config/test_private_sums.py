"""Which settings noised sums get, and that the committed trial supports them."""

import json
from pathlib import Path

import pytest

from perennial.config.experiment import Experiment
from perennial.config.private_sums import COMPONENTS, LEAST_A_CLASS, MEANS_ALONE, private_sums
from perennial.foundation.errors import ConfigError
from perennial.privacy.accountants import make_accountant
from perennial.privacy.noised_sums import BLOCKS

CELLS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "private_sums_choice.json").read_text()
)["cells"]
CLASSES = {"digits": 10, "cifar100": 20}


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (13,)])
@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_they_make_an_experiment_that_costs_what_was_asked(shape: tuple[int, ...], epsilon: float) -> None:
    found = private_sums(shape, 2000, 5, epsilon, sites=4, tasks=2)
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
    few, many = (private_sums((3, 32, 32), count, 7, 2.0, sites=4) for count in (300, 50_000))
    assert few.privacy["blocks"] == list(MEANS_ALONE) and "blocks" not in many.privacy
    assert few.model["projection"] < many.model["projection"]
    # one noise in all bears more than four
    assert private_sums((8,), 1500, 7, 2.0, sites=4).privacy.get("blocks")
    assert not private_sums((8,), 1500, 7, 2.0, sites=1).privacy.get("blocks")


def accuracy(data: str, width: int, strength: float, blocks: tuple[float, ...]) -> float:
    return next(
        cell["accuracy"]
        for cell in CELLS
        if (cell["data"], cell["width"], cell["strength"], tuple(cell["blocks"]))
        == (data, width, strength, blocks)
    )


def test_the_trial_supports_the_blocks() -> None:
    """Where more than chance is left, the recommended blocks lose at most 2.2 points to the others."""
    for cell in CELLS:
        data, width, strength = cell["data"], cell["width"], cell["strength"]
        whole = strength >= LEAST_A_CLASS * CLASSES[data]
        taken, other = (BLOCKS, MEANS_ALONE) if whole else (MEANS_ALONE, BLOCKS)
        worth = accuracy(data, width, strength, taken)
        assert worth >= accuracy(data, width, strength, other) - 2.2, cell


def test_the_trial_supports_the_components() -> None:
    for strength in sorted({cell["strength"] for cell in CELLS if cell["strength"] >= 300}):
        width = next(components for least, components in COMPONENTS if strength >= least)
        best = {
            w: max(accuracy("cifar100", w, strength, b) for b in (BLOCKS, MEANS_ALONE))
            for w in (24, 48, 96, 192)
        }
        assert best[width] >= max(best.values()) - 1.0, (strength, best)


def test_nothing_to_choose_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 records"):
        private_sums((8,), 0, 2, 1.0, sites=1)
