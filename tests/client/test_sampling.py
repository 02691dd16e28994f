"""Who is asked in a round, what is drawn in it, and which exemplars stay: each draw is its own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.config.run import RunSettings
from perennial.data.config import AugmentationConfig
from perennial.engine.run import run_in_process
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet, shuffle_batches

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


def test_balanced_batches_draw_rare_classes_as_often_as_common_ones() -> None:
    y = torch.tensor([0] * 900 + [1] * 90 + [3] * 10)
    data = TrainingSet(torch.zeros(1000, 2), y, torch.zeros(1), torch.ones(1))
    batches = shuffle_batches(data, 100, stream(3, "batches"), AugmentationConfig(), balanced=True)
    drawn = torch.cat([labels for _, _, labels in batches])
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert sum(counts) == 1000 and counts[2] == 0
    # about 333 each; 5 standard deviations of a binomial are 75
    assert all(abs(count - 1000 / 3) < 75 for count in (counts[0], counts[1], counts[3]))


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
