"""Adapt, then solve: what a closed-form head gains where sites first train the last stages of its map.

`python -m benchmarks adapt_pilot` runs what is missing and writes results/adapt_pilot.jsonl, one
line a model as soon as it is there, and .md. HAM10000 at 128 x 96, its four clinics, all training images,
classes in three tasks, the map of experiments/analytic_ham10000_pretrained.yaml. Step sizes and shrinkages
are those that validation lesions of TRIAL_SEED prefer; nothing else is chosen on data.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapt_data import Campaign, Division, prepared
from benchmarks.adapt_page import (
    ADAPTED,
    ALONE,
    FIRST,
    FROZEN,
    NAME,
    POOLED,
    POOLED_SOFTMAX,
    SEEDS,
    SOFTMAX,
    WHOLE,
    page,
)
from benchmarks.environment import machine, versions
from benchmarks.last_stages import (
    LastStages,
    Stored,
    Training,
    train_in_one_place,
    train_task,
)
from benchmarks.table import RESULTS, ROOT
from perennial.foundation.files import replace_file
from perennial.learning.analytic.solve import LinearHead, Sums, ridge
from perennial.learning.analytic.statistics import Collector, SumsForm, weighted
from perennial.models.feature_maps.ball import on_grid
from perennial.strategies.statistics.balanced import weights_of

ABOUT = "the last stages of a map trained in federation, then solved: a pilot"
TRIAL_SEED, HELD_OUT = 900, 0.4
"""Of the trials, and the share of training lesions that validate there."""
MADE = ROOT / "build" / NAME
TRIALS: Mapping[str, Sequence[Training | None]] = {
    FROZEN: [None],
    POOLED: [Training(2e-4, (4,)), Training(6e-4, (4,)), Training(4e-4, (6,))],
    ADAPTED: [Training(5e-4, (3, 2, 5)), Training(1e-3, (3, 2, 5)), Training(5e-4, (3, 2, 8))],
}
"""What is trained -> the settings that are tried. What is adapted on the first task alone has the chosen
setting of all tasks.
"""
SHRINKAGES = (0.1, 0.3, 1.0, 3.0)
LARGER = (10.0, 30.0, 100.0)
"""Tried in turn as long as the largest one before is the best."""
SOFTMAX_OF = {POOLED: POOLED_SOFTMAX, ADAPTED: SOFTMAX}
Line = dict[str, Any]
Shrinkages = Mapping[str, float]
"""Map -> shrinkage."""


def solved(features: Tensor, y: Tensor, rows: Tensor, shrinkages: Sequence[float]) -> dict[float, LinearHead]:
    """Shrinkage -> class-balanced ridge on the sums over these rows, as all sites' sums together give it.

    Sums are exact, so that who adds which image changes no bit of them (learning/analytic/statistics.py).
    """
    classes = range(int(y.max()) + 1)
    counts = torch.bincount(y[rows], minlength=len(classes)).tolist()

    def of_class(label: int) -> Any:
        collector = Collector(features.shape[1], range(label, label + 1))
        held = rows[y[rows] == label]
        collector.add(features[held], y[held])
        return collector.finish()

    parts = zip(map(of_class, classes), weights_of({"all": counts}, classes), strict=True)
    sums = Sums.of(weighted(parts, features.shape[1] + 1, classes), samples=len(rows))
    return {shrinkage: ridge(sums, shrinkage, True) for shrinkage in shrinkages}


def balanced(answers: Tensor, labels: Tensor) -> float:
    """Mean share of right answers of the classes that occur."""
    hits = (answers == labels).double()
    return float(torch.stack([hits[labels == label].mean() for label in labels.unique()]).mean())


class Judge:
    """Features of one trained network, and what heads on them answer."""

    def __init__(self, model: LastStages, stored: Stored, rows: Tensor) -> None:
        """rows: of the images that are looked at."""
        start = time.process_time()
        own, self.logits = model.features(stored, rows)
        self.maps = {WHOLE: on_grid(torch.cat([own, stored.beside[rows]], dim=1)), ALONE: on_grid(own)}
        self.place = torch.full((len(stored.views),), -1)
        self.place[rows] = torch.arange(len(rows))
        self.seconds = time.process_time() - start

    def solved(
        self, map_: str, division: Division, shrinkages: Sequence[float]
    ) -> dict[float, Callable[[Tensor], Tensor]]:
        """Shrinkage -> what a head on the sums over all training images answers to the images in rows."""
        features, rows = self.maps[map_], self.place[division.rows("train")]
        labels = torch.empty(len(features), dtype=torch.int64)
        labels[self.place[self.place >= 0]] = division.y[self.place >= 0]
        heads = solved(features, labels, rows, shrinkages)

        def answers(head: LinearHead, asked: Tensor) -> Tensor:
            return head.scores(features[self.place[asked]]).argmax(dim=1)

        return {shrinkage: partial(answers, head) for shrinkage, head in heads.items()}

    def own(self, rows: Tensor) -> Tensor:
        """Answers of the network's softmax head."""
        return self.logits[self.place[rows]].argmax(dim=1)


@cache
def _frozen_judge(campaign: Campaign) -> Judge:
    model = LastStages(campaign.network, campaign.stored.size, 1)
    return Judge(model, campaign.stored, torch.arange(len(campaign.stored.views)))


def judge_of(campaign: Campaign, model: LastStages, training: Training | None, rows: Tensor) -> Judge:
    """Of these images; of the frozen map, which no seed changes, once of all."""
    return _frozen_judge(campaign) if training is None else Judge(model, campaign.stored, rows)


def sums_megabytes(division: Division, width: int, *, again: bool) -> float:
    """All sites' sums of all tasks, each of its new classes, or again of all that came so far."""
    total = 0
    for task in range(1, division.schedule.count + 1):
        new = division.schedule.classes_of(task)
        asked = range(0 if again else new.start, new.stop)
        holding = sum(
            bool(((division.y[rows] >= asked.start) & (division.y[rows] < asked.stop)).any())
            for rows in division.sites.values()
        )
        total += holding * SumsForm(width + 1).bytes(len(asked))
    return total / 1e6


def trained(
    campaign: Campaign, division: Division, row: str, training: Training | None
) -> tuple[LastStages, float, float]:
    """A row's network, the minutes that its training took, and the megabytes of all its messages.

    training: None: the frozen map.
    """
    stored, y, seed = campaign.stored, division.y, division.seed
    model = LastStages(campaign.network, stored.size, len(division.federation.classes))
    start, parts = time.process_time(), 0
    if training is not None and row == POOLED:
        train_in_one_place(model, stored, y, division.rows("train"), training, seed)
    elif training is not None:
        for task in range(1, 2 if row == FIRST else division.schedule.count + 1):
            of = division.schedule, task
            parts += train_task(model, stored, y, division.sites, training, of, seed)
    megabytes = parts * 2 * 4 * sum(value.numel() for value in model.trained) / 1e6
    return model, (time.process_time() - start) / 60, megabytes


def trial(campaign: Campaign, row: str, training: Training | None) -> list[Line]:
    """What validation lesions say of a setting."""
    division = Division(TRIAL_SEED, HELD_OUT)
    rows, judged = division.rows("train"), division.rows("validation")
    model, minutes, _ = trained(campaign, division, row, training)
    judge = judge_of(campaign, model, training, torch.cat([rows, judged]))
    labels = division.y[judged]
    validation: dict[str, dict[str, float]] = {}
    for map_ in judge.maps:
        found = validation[map_] = {}
        for shrinkages in (SHRINKAGES, *((larger,) for larger in LARGER)):
            if not found or best_of(found) == list(map(float, found))[-1]:
                for shrinkage, answers in judge.solved(map_, division, shrinkages).items():
                    found[str(shrinkage)] = round(balanced(answers(judged), labels), 4)
    softmax = round(balanced(judge.own(judged), labels), 4) if row in SOFTMAX_OF else None
    return [
        {
            **{"kind": "trial", "row": row, "seed": TRIAL_SEED, "training": _said(training)},
            **{"validation": validation, "softmax": softmax, "minutes": round(minutes, 2)},
            "images": [len(rows), len(judged)],
        }
    ]


def _said(training: Training | None) -> dict[str, Any] | None:
    return None if training is None else {"lr": training.lr, "lengths": list(training.lengths)}


def best_of(found: Mapping[str, float]) -> float:
    """The shrinkage of the highest accuracy; of equals the largest."""
    return max((share, float(shrinkage)) for shrinkage, share in found.items())[1]


def chosen(lines: Sequence[Line], row: str) -> tuple[Training | None, Shrinkages]:
    """The setting of a row that validation prefers with the map as it is today, and its shrinkages.

    Of equals the earlier setting and the larger shrinkage.
    """
    tried = [line for line in lines if line["kind"] == "trial" and line["row"] == row]
    best = max(tried, key=lambda line: max(line["validation"][WHOLE].values()))
    shrinkages = {map_: best_of(found) for map_, found in best["validation"].items()}
    said = best["training"]
    return None if said is None else Training(said["lr"], tuple(said["lengths"])), shrinkages


def run_one(
    campaign: Campaign, seed: int, row: str, training: Training | None, shrinkages: Shrinkages
) -> list[Line]:
    """Lines of one seed's models."""
    division, lines = Division(seed), []
    model, minutes, megabytes = trained(campaign, division, row, training)
    facts = {
        **{"kind": "run", "row": row, "seed": seed, "training": _said(training)},
        **{"minutes": round(minutes, 2), "training_megabytes": round(megabytes, 1)},
    }
    judge = judge_of(campaign, model, training, torch.arange(len(division.y)))
    for map_, features in judge.maps.items():
        start, sent = time.process_time(), None
        [answers] = judge.solved(map_, division, [shrinkages[map_]]).values()
        told = division.told(answers(division.test))
        if row != POOLED:
            sent = round(sums_megabytes(division, features.shape[1], again=row == ADAPTED), 1)
        seconds = round(judge.seconds + time.process_time() - start, 1)
        lines.append(
            {
                **{**facts, "map": map_, "shrinkage": shrinkages[map_], "sums_megabytes": sent},
                **{"solving_seconds": seconds, "answers": told},
            }
        )
    if row in SOFTMAX_OF:
        told = division.told(judge.own(division.test))
        lines.append({**facts, "row": SOFTMAX_OF[row], "map": None, "answers": told})
    return lines


def key(line: Line) -> str:
    """What a line is about; lines of one key are the same measurement."""
    return json.dumps([line.get(name) for name in ("kind", "row", "seed", "map", "training", "shrinkage")])


def of_trial(row: str, training: Training | None) -> list[str]:
    """Keys of its lines."""
    return [key({"kind": "trial", "row": row, "seed": TRIAL_SEED, "training": _said(training)})]


def of_run(seed: int, row: str, training: Training | None, shrinkages: Shrinkages) -> list[str]:
    """Keys of its lines."""
    told = {"kind": "run", "seed": seed, "training": _said(training)}
    solved_ = [{**told, "row": row, "map": map_, "shrinkage": s} for map_, s in shrinkages.items()]
    own = [{**told, "row": SOFTMAX_OF[row]}] if row in SOFTMAX_OF else []
    return [key(line) for line in [*solved_, *own]]


def run_missing(record: Path, folder: Path = MADE, say: Callable[[str], None] = print) -> list[Line]:
    """All lines of the campaign as it is now, after running those that record lacks."""
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    held = {key(line): line for line in lines}
    campaign = prepared(Division(SEEDS[0]), folder, say)
    wanted: list[Line] = []

    def have(keys: Sequence[str], make: Callable[[], Sequence[Line]], what: str) -> None:
        if not held.keys() >= set(keys):
            with record.open("a") as file:
                for made in make():
                    line = {**made, "versions": versions(), "machine": machine()}
                    file.write(json.dumps(line) + "\n")
                    held[key(line)] = json.loads(json.dumps(line))
            say(f"{time.strftime('%H:%M')} {what}")
        wanted.extend(held[one] for one in keys)

    have([key({"kind": "images"})], lambda: [_images(Division(SEEDS[0]), campaign)], "test images")

    def tried(row: str, trainings: Sequence[Training | None]) -> None:
        for one in trainings:
            have(of_trial(row, one), partial(trial, campaign, row, one), f"{row}, trial {_said(one)}")

    def run(seed: int, row: str) -> None:
        training, shrinkages = chosen(wanted, row)
        make = partial(run_one, campaign, seed, row, training, shrinkages)
        have(of_run(seed, row, training, shrinkages), make, f"{row}, seed {seed}")

    for row, trainings in TRIALS.items():
        tried(row, trainings)
    for seed in SEEDS:
        for row in TRIALS:
            run(seed, row)
    tried(FIRST, [chosen(wanted, ADAPTED)[0]])
    for seed in SEEDS:
        run(seed, FIRST)
    return wanted


def _images(division: Division, campaign: Campaign) -> Line:
    assert division.federation.test is not None
    lesions = division.federation.test.keyed.numbered(division.test)
    return {
        **{"kind": "images", "classes": sorted(division.federation.classes)},
        **{"labels": division.told(division.y[division.test]), "lesions": lesions.tolist()},
        "training_images": {name: len(rows) for name, rows in division.sites.items()},
        "frozen_minutes": campaign.frozen_minutes,
    }


def main(results: Path = RESULTS, say: Callable[[str], None] = print) -> None:
    """Run what is missing and write the page; runs with other settings are dropped."""
    record = results / f"{NAME}.jsonl"
    lines = run_missing(record, say=say)
    replace_file(record, "".join(json.dumps(line) + "\n" for line in lines).encode(), mode=0o644)
    (results / f"{NAME}.md").write_text(page(lines))


if __name__ == "__main__":
    main()
