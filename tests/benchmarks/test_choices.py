"""Settings are tried on validation samples; rules for a number of clusters find plain groups."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.choices import validation_as_test
from benchmarks.cluster_numbers import calinski_harabasz, longest_merge, silhouette
from benchmarks.table_times import Time
from benchmarks.tried_settings import CHOICES
from perennial.config.experiment import load_experiment
from perennial.config.simulation import forget_simulated, simulated_federation
from perennial.foundation.errors import ConfigError

from benchmarks.table import EXPERIMENTS  # isort: skip

DIGITS = EXPERIMENTS / "pp_fcil_digits.yaml"


def test_no_test_sample_takes_part_in_a_choice() -> None:
    forget_simulated()
    experiment = load_experiment(DIGITS, seed=11)
    plain = simulated_federation(experiment)
    with validation_as_test():
        chosen = simulated_federation(experiment)
        assert chosen.test is not None
        for name, site in chosen.sites.items():
            assert torch.equal(site.test, plain.sites[name].validation)
            assert torch.equal(site.train, plain.sites[name].train)
        tested = {index for site in chosen.sites.values() for index in site.test.tolist()}
        assert set(chosen.test.test.tolist()) == tested
        assert plain.test is not None
        assert not tested & set(plain.test.test.tolist())
    assert simulated_federation(experiment).test is not chosen.test


def test_without_validation_samples_there_is_nothing_to_choose_by() -> None:
    experiment = load_experiment(DIGITS, ["data.validation_fraction=0"], 11)
    with validation_as_test(), pytest.raises(ConfigError, match="no validation samples to choose by"):
        simulated_federation(experiment)


def test_no_choice_has_a_seed_of_a_table() -> None:
    assert all(seed > 10 for table in CHOICES.values() for seed in table.seeds)


@pytest.mark.parametrize("rule", [silhouette, calinski_harabasz, longest_merge])
def test_a_rule_finds_four_plain_groups(rule: Any) -> None:
    generator = np.random.default_rng(0)
    matrix = np.repeat(10 * np.eye(4), 4, axis=0) + generator.normal(size=(16, 4))
    assert rule(matrix) == 4


def test_a_table_with_missing_runs_is_judged_by_those_that_are_there() -> None:
    time = Time(runs=5, planned=20, minutes=2.0, quiet=1.5, controls=1.0)
    assert time.whole == 9.0 and time.whole_quiet == 6.0
