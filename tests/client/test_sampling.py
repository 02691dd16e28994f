"""Who is asked in a round, what is drawn in it, and which exemplars stay: each draw is its own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.client.exemplars import ExemplarStore
from perennial.client.state import SiteState
from perennial.config.learner import Memory
from perennial.config.run import RunSettings
from perennial.data.augmentation import to_float
from perennial.data.config import AugmentationConfig
from perennial.data.partition import partition
from perennial.data.partition_config import PartitionConfig
from perennial.data.site import SiteData
from perennial.data.splits import KeyedHash, content_groups
from perennial.engine.run import run_in_process
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet, shuffled

EXPERIMENT: dict[str, Any] = {
    "name": "sampled",
    "seed": 4,
    "data": {"source": "digits", "sites": 8, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"increments": [10], "rounds": 12},
    "model": {"name": "mlp", "hidden": [4]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}


def run(folder: Path, **changes: Any) -> Path:
    """The run folder of a small run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    run_in_process(RunSettings(str(path), runs=str(folder / "runs")))
    return folder / "runs" / "sampled"


def asked(folder: Path) -> list[list[str]]:
    """The sites that took part in each round."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["participants"] for event in events if event["event"] == "round"]


@pytest.mark.parametrize(
    ("fraction", "quorum", "each"), [(0.5, 1, 4), (0.3, 1, 2), (0.1, 3, 3), (0.01, 1, 1)]
)
def test_a_fraction_of_the_sites_is_asked_another_one_in_each_round(
    tmp_path: Path, fraction: float, quorum: int, each: int
) -> None:
    rounds = asked(run(tmp_path, rounds={"fraction": fraction, "quorum": quorum}))
    assert [len(set(sites)) for sites in rounds] == [each] * 12
    assert len({tuple(sites) for sites in rounds}) >= 6
    counts = Counter(site for sites in rounds for site in sites)
    # 12 rounds ask for each * 12 of 8 sites; nobody is asked always, and with half nobody is forgotten
    assert max(counts.values()) < 12
    assert each < 4 or len(counts) == 8


def test_the_same_seed_asks_the_same_sites_and_another_seed_others(tmp_path: Path) -> None:
    rounds = {"fraction": 0.5}
    first = asked(run(tmp_path / "first", rounds=rounds))
    assert first == asked(run(tmp_path / "again", rounds=rounds))
    assert first != asked(run(tmp_path / "other", rounds=rounds, seed=5))


def test_all_sites_are_asked_without_a_fraction(tmp_path: Path) -> None:
    rounds = asked(run(tmp_path, tasks={"increments": [10], "rounds": 2}))
    assert rounds == [[f"site-{number}" for number in range(8)]] * 2


def order_of_batches(seed: int, *ids: int | str) -> list[list[int]]:
    """The rows of two epochs."""
    data = TrainingSet(torch.arange(40.0)[:, None], torch.zeros(40).long(), torch.zeros(1), torch.ones(1))
    generator = stream(seed, "batches", *ids)
    return [
        [int(row) for rows, _, _ in shuffled(data, 8, generator, AugmentationConfig()) for row in rows]
        for _ in range(2)
    ]


def test_each_epoch_round_and_site_has_an_order_of_its_own() -> None:
    orders = [
        order
        for site in ("site-0", "site-1")
        for number in (1, 2, 3)
        for order in order_of_batches(7, site, number)
    ]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 12


def test_batches_hold_the_rows_that_they_name() -> None:
    x = torch.arange(60, dtype=torch.uint8).view(20, 1, 1, 3)
    y = torch.arange(20) % 4
    data = TrainingSet(x, y, torch.tensor([0.5]), torch.tensor([0.25]))
    for rows, inputs, labels in shuffled(data, 6, stream(1, "batches"), AugmentationConfig()):
        assert torch.equal(labels, y[rows])
        assert torch.equal(inputs, to_float(x[rows], data.mean, data.std))


def test_a_last_batch_of_one_sample_is_left_out_only_on_request() -> None:
    data = TrainingSet(torch.zeros(9, 2), torch.zeros(9).long(), torch.zeros(1), torch.ones(1))
    for drop, sizes in ((False, [4, 4, 1]), (True, [4, 4])):
        batches = shuffled(data, 4, stream(1, "batches"), AugmentationConfig(), drop_single=drop)
        assert [len(rows) for rows, _, _ in batches] == sizes
    one = TrainingSet(torch.zeros(1, 2), torch.zeros(1).long(), torch.zeros(1), torch.ones(1))
    batches = shuffled(one, 4, stream(1, "batches"), AugmentationConfig(), drop_single=True)
    assert [len(rows) for rows, _, _ in batches] == [1]


def test_balanced_batches_draw_rare_classes_as_often_as_common_ones() -> None:
    y = torch.tensor([0] * 900 + [1] * 90 + [3] * 10)
    data = TrainingSet(torch.zeros(1000, 2), y, torch.zeros(1), torch.ones(1))
    batches = shuffled(data, 100, stream(3, "batches"), AugmentationConfig(), balanced=True)
    drawn = torch.cat([labels for _, _, labels in batches])
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert sum(counts) == 1000 and counts[2] == 0
    # about 333 each; 5 standard deviations of a binomial are 75
    assert all(abs(count - 1000 / 3) < 75 for count in (counts[0], counts[1], counts[3]))


def store_of(folder: Path, per_class: int, classes: int) -> tuple[ExemplarStore, dict[int, torch.Tensor]]:
    """A site's exemplar store, and the indices of each class in its data."""
    count = per_class * classes
    x = torch.arange(count, dtype=torch.float32)[:, None]
    y = torch.arange(classes).repeat_interleave(per_class)
    none = torch.empty(0, dtype=torch.int64)
    keyed = KeyedHash(bytes(32), content_groups(x))
    data = SiteData("graz", x, y, torch.arange(count), none, none, torch.zeros(1), torch.ones(1), keyed)
    store = ExemplarStore(SiteState(folder, "graz"), data, [f"class-{label}" for label in range(classes)])
    return store, {label: torch.arange(count)[y == label] for label in range(classes)}


@pytest.mark.parametrize("selection", ["herding", "nearest", "random"])
def test_older_lists_shrink_to_their_first_entries_as_classes_arrive(tmp_path: Path, selection: Any) -> None:
    memory = Memory(selection=selection, fixed_total=48)
    store, members = store_of(tmp_path, 20, 6)
    features = {label: torch.sin(rows[:, None] * torch.tensor([1.0, 1.7])) for label, rows in members.items()}
    before: dict[int, list[int]] = {}
    for task in range(3):
        known = 2 * (task + 1)
        quota = memory.quota(known, sites=2)
        assert quota == 48 // (known * 2)
        new = {label: members[label] for label in (known - 2, known - 1)}
        store.choose(memory, quota, features, new, version=task + 1)
        kept = store.indices(before_round=task + 2).tolist()
        lists = {label: [i for i in kept if i in members[label].tolist()] for label in range(known)}
        assert [len(chosen) for chosen in lists.values()] == [quota] * known
        for label, chosen in before.items():
            assert lists[label] == chosen[:quota]
        before = lists
    # what was stored before the last task is still what it was for a round that is repeated
    assert len(store.indices(before_round=3)) == 4 * 6


def test_a_run_keeps_no_more_than_its_fixed_total(tmp_path: Path) -> None:
    folder = run(
        tmp_path,
        data=EXPERIMENT["data"] | {"sites": 2, "samples_limit": 600},
        tasks={"count": 5, "rounds": 1},
        learner=EXPERIMENT["learner"] | {"memory": {"fixed_total": 60}},
    )
    for site in ("site-0", "site-1"):
        records = sorted(folder.glob(f"sites/{site}/**/exemplars-*.safetensors"))
        sizes = [len(load_file(record)["index"]) for record in records[-3:]]
        # 60 / (known classes * 2 sites) of each: 5 of 6, 3 of 8, 3 of 10
        assert sizes == [30, 24, 30]


def test_the_split_of_a_class_has_a_stream_of_its_own() -> None:
    labels = np.repeat(np.arange(6), 40)
    config = PartitionConfig(kind="iid")
    names = [f"class-{label}" for label in range(6)]
    parts = partition(config, labels, 4, 3, [0, 3, 6], names=names).indices
    within = [
        [tuple((rows[labels[rows] == label] - 40 * label).tolist()) for rows in parts] for label in range(6)
    ]
    # the same positions of two classes at one site would be one stream for both
    assert len({tuple(shares) for shares in within}) == 6
    alone = partition(config, labels[:120], 4, 3, [0, 3], names=names[:3]).indices
    for rows, first in zip(parts, alone, strict=True):
        assert np.array_equal(rows[rows < 120], first)
    other = partition(config, labels, 4, 4, [0, 3, 6], names=names).indices
    assert not all(np.array_equal(one, two) for one, two in zip(parts, other, strict=True))


def test_streams_differ_by_seed_purpose_and_each_id_and_stay_what_they_are() -> None:
    asked = [
        (0, "batches"),
        (1, "batches"),
        (0, "split"),
        (0, "batches", 1),
        (0, "batches", 2),
        (0, "batches", "site-1"),
        (0, "batches", "site-2"),
        (0, "batches", "site-1", 1),
        (0, "batches", 1, 2),
        (0, "batches", 2, 1),
    ]
    draws = [
        tuple(stream(seed, purpose, *ids).integers(0, 2**40, 4).tolist()) for seed, purpose, *ids in asked
    ]
    assert len(set(draws)) == len(asked)
    # recorded: every run that was ever reported depends on these
    recorded = [1073824298363, 208428016395, 622084559698]
    assert stream(0, "batches", "site-1", 1).integers(0, 2**40, 3).tolist() == recorded
