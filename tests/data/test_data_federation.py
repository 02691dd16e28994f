"""The simulated federation as a whole: who holds what, what is tested on what, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.data.config import DataConfig
from perennial.data.federation import SimulatedFederation, build
from perennial.data.tasks_config import TasksConfig

FIVE_TASKS = TasksConfig(count=5, rounds=2)


def digits(seed: int = 1, tasks: TasksConfig = FIVE_TASKS, **block: Any) -> SimulatedFederation:
    return build(DataConfig.model_validate({"source": "digits", "sites": 4, **block}), tasks, seed)


def arrays(path: Path, x: np.ndarray, y: np.ndarray, **more: np.ndarray) -> dict[str, Any]:
    np.savez(path / "a.npz", x=x, y=y, **more)  # pyright: ignore[reportArgumentType]
    return {"source": "npz", "path": str(path / "a.npz")}


def holdings(federation: SimulatedFederation) -> dict[str, list[list[int]]]:
    return {
        name: [site.part(part).tolist() for part in ("train", "validation", "test")]
        for name, site in federation.sites.items()
    }


partitions = st.sampled_from(
    [
        {"kind": "iid"},
        {"kind": "dirichlet", "alpha": 0.5, "min_samples": 5},
        {"kind": "class_subset", "classes_per_site": 1},
    ]
)


@settings(deadline=None, max_examples=15)
@given(partition=partitions, seed=st.integers(0, 1000))
def test_every_sample_is_in_one_part_of_one_site(partition: dict[str, Any], seed: int) -> None:
    federation = digits(seed, partition=partition)
    indices = [place for parts in holdings(federation).values() for part in parts for place in part]
    assert sorted(indices) == list(range(1797))
    assert federation.test is not None
    tested = torch.cat([site.test for site in federation.sites.values()])
    assert torch.equal(tested.sort().values, federation.test.test)
    assert holdings(digits(seed, partition=partition)) == holdings(federation)


@pytest.mark.parametrize(("samples", "tests"), [(400, 100), (0.25, 0.3)])
def test_caps_are_met_on_average(samples: float, tests: float) -> None:
    whole = digits(validation_fraction=0)
    assert whole.test is not None
    trained = sum(len(site.train) for site in whole.sites.values())
    expected = [
        limit if isinstance(limit, int) else limit * found
        for limit, found in ((samples, trained), (tests, len(whole.test.test)))
    ]
    found = []
    for seed in range(1, 7):
        federation = digits(seed, samples_limit=samples, test_limit=tests, validation_fraction=0)
        assert federation.test is not None
        found.append([sum(len(site.train) for site in federation.sites.values()), len(federation.test.test)])
        assert sum(len(site.test) for site in federation.sites.values()) == found[-1][1]
    # the mean of six binomial counts, within five standard deviations
    assert np.all(np.abs(np.mean(found, axis=0) - expected) < 5 * np.sqrt(np.array(expected) / 6))
    assert holdings(digits(samples_limit=5000)) == holdings(digits())


@settings(deadline=None, max_examples=10)
@given(partition=partitions, seed=st.integers(0, 1000))
def test_a_continued_run_finds_every_earlier_share_unchanged(partition: dict[str, Any], seed: int) -> None:
    six, ten = [str(name) for name in range(6)], [str(name) for name in range(10)]
    before = digits(seed, TasksConfig(count=3, rounds=1), classes=six, partition=partition)
    after = digits(seed, TasksConfig(count=5, rounds=1), classes=ten, partition=partition)
    later = build(
        DataConfig.model_validate({"source": "digits", "sites": 4, "classes": ten, "partition": partition}),
        TasksConfig(count=5, rounds=1),
        seed,
        earlier=before.registry,
    )
    assert later.classes[:6] == before.classes
    assert later.order_hash != before.order_hash
    for name, site in before.sites.items():
        for part in ("train", "validation", "test"):
            old = {site.sample_hash(place) for place in site.part(part).tolist()}
            new = later.site(name)
            assert {new.sample_hash(place) for place in new.find_task_indices(part, 0, 6).tolist()} == old
    written = build(
        DataConfig.model_validate({"source": "digits", "sites": 4, "classes": ten, "partition": partition}),
        later.registry.as_tasks(),
        seed,
    )
    assert holdings(written) == holdings(later)
    assert sorted(after.classes) == sorted(later.classes)


def test_the_official_test_set_is_kept(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2
    block = arrays(tmp_path, x, y, x_test=x[:6] + 1000, y_test=y[:6])
    federation = build(DataConfig.model_validate({**block, "sites": 2}), TasksConfig(count=1, rounds=1), 0)
    assert federation.test is not None
    assert federation.test.test.tolist() == list(range(20, 26))
    assert federation.test.x[20:].min() >= 1000
    assert [len(site.test) for site in federation.sites.values()] == [4, 2]


def test_numbers_are_standardised_by_the_training_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(50, 8, (100, 1)), np.full((100, 1), 3.0)], axis=1)
    federation = build(
        DataConfig.model_validate({**arrays(tmp_path, x, np.arange(100) % 2), "sites": 2}),
        TasksConfig(count=1, rounds=1),
        0,
    )
    rows = torch.cat([torch.cat([site.train, site.validation]) for site in federation.sites.values()])
    train = federation.site("site-0").x[rows].double()
    assert torch.allclose(federation.mean.double(), train.mean(dim=0))
    assert torch.allclose(
        federation.std.double(), torch.tensor([train[:, 0].std(correction=0), 1.0]).double()
    )


def test_a_site_with_one_sample_trains_on_it_or_takes_no_part(tmp_path: Path) -> None:
    x, y = np.arange(336, dtype=np.float32).reshape(21, 1, 4, 4), np.arange(21) % 2
    block = arrays(tmp_path, x, y, site=np.repeat(["big", "tiny"], [20, 1]))
    config = DataConfig.model_validate({**block, "partition": {"kind": "natural"}})
    held = set()
    for seed in range(100):
        federation = build(config, TasksConfig(count=1, rounds=1), seed)
        if "tiny" in federation.sites:
            tiny = federation.site("tiny")
            held.add((len(tiny.train), len(tiny.validation), len(tiny.test)))
        else:
            held.add("nothing")
            assert "site 'tiny' holds no training sample and takes no part" in federation.notes
    assert held == {(1, 0, 0), (0, 1, 0), "nothing"}


def test_a_site_without_samples_takes_no_part_and_is_noted(tmp_path: Path) -> None:
    block = arrays(tmp_path, np.arange(64, dtype=np.uint8).reshape(4, 4, 4), np.arange(4) % 2)
    block |= {"test_fraction": 0, "validation_fraction": 0}
    config = DataConfig.model_validate({**block, "sites": 3})
    federation = build(config, TasksConfig(count=2, rounds=1, order="natural"), 0)
    assert federation.site_names == ("site-0", "site-1", "site-2")
    config = config.model_copy(update={"sites": 5})
    federation = build(config, TasksConfig(count=1, rounds=1, order="natural"), 0)
    assert len(federation.sites) == 4
    assert federation.notes == (
        "class '0': 2 samples, so only 2 of 5 sites hold it",
        "class '1': 2 samples, so only 2 of 5 sites hold it",
        "site 'site-4' holds no training sample and takes no part",
    )
