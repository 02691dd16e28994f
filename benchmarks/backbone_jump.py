"""How far a dual backbone falls when a task begins, with and without distilling its fused features.

`python -m benchmarks.backbone_jump` runs what results/backbone_jump.jsonl lacks and writes the
page beside it. A task begins with the new backbone of the one before alone. So each finished model is
tested as it is, and with the new backbone's features in place of the fused ones: what a further task would
begin with, before any training.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import machine, versions
from benchmarks.grid import read_results, settings_hash
from benchmarks.intervals import t_interval
from benchmarks.table import RESULTS, Row
from benchmarks.tables.pp_fcil import CENTRAL, CONSOLIDATION, DIGITS, FULL, ONE_BACKBONE
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_federation
from perennial.engine.run import run_in_process
from perennial.learning.batches import TrainingSet
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.saved import GLOBAL_MODEL, load_saved

RECORD, PAGE = RESULTS / "backbone_jump.jsonl", RESULTS / "backbone_jump.md"
SEEDS = (1, 2, 3, 4, 5)
ROWS = (Row(FULL, DIGITS, (CENTRAL,)), Row(ONE_BACKBONE, DIGITS, (CENTRAL, CONSOLIDATION)))
FUSED, ALONE, FALL, DISTANCE = "fused features", "new backbone alone", "fall", "distance"
"""Accuracies in per cent, their difference, and the distance of the features in per cent of their norm."""


@torch.no_grad()
def measured(model: DualBackboneModel, experiment: Experiment) -> dict[str, float]:
    """Of a finished model on the server's test set."""
    federation = simulated_federation(experiment)
    test = federation.test
    assert test is not None
    rows = test.part("test")
    data = TrainingSet(test.x[rows], test.y[rows], federation.mean, federation.std)
    inputs, labels = data.inputs(slice(None)), data.y
    fused, new = model.features(inputs), model.backbone(inputs)
    accuracies = [
        100 * float((model.classify(features).argmax(dim=1) == labels).float().mean())
        for features in (fused, new)
    ]
    distance = 100 * float((new - fused).norm() / fused.norm())
    return {
        FUSED: accuracies[0],
        ALONE: accuracies[1],
        FALL: accuracies[0] - accuracies[1],
        DISTANCE: distance,
    }


def run(row: Row, seed: int) -> dict[str, Any]:
    """One line of the record."""
    experiment = row.load(seed)
    with tempfile.TemporaryDirectory(prefix="perennial-jump-") as folder:
        overrides = ";".join((*row.changes, f"seed={seed}"))
        run_in_process(RunSettings(str(row.file), overrides, runs=folder))
        (path,) = Path(folder).glob(f"*/{GLOBAL_MODEL}")
        model = load_saved(path).model
    assert isinstance(model, DualBackboneModel)
    return {
        "row": row.label,
        "seed": seed,
        "settings": settings_hash(experiment),
        "measures": measured(model, experiment),
        "versions": versions(),
        "machine": machine(),
    }


def page(lines: list[dict[str, Any]]) -> str:
    """The figures, and by how much distilling makes the fall smaller."""
    heads = (FUSED, ALONE, FALL, DISTANCE)
    found = {
        (row.label, head): [line["measures"][head] for line in lines if line["row"] == row.label]
        for row in ROWS
        for head in heads
    }
    text = [
        "# How far a dual backbone falls when a task begins",
        "",
        "`python -m benchmarks.backbone_jump`. PP-FCIL on digits as in its table, seeds "
        f"{', '.join(map(str, SEEDS))}: accuracy in per cent of the last model on the server's test set, as "
        "it is and with the new backbone's features alone, which is what a further task would begin with; "
        "and how far the two are apart, in per cent of the fused features' norm. 95 % t-intervals.",
        "",
        f"| | {' | '.join(heads)} |",
        "| --- " * (len(heads) + 1) + "|",
    ]
    for row in ROWS:
        intervals = [t_interval(found[row.label, head]) for head in heads]
        cells = [f"{each.mean:.1f} ± {each.high - each.mean:.1f}" for each in intervals]
        text.append(f"| {row.label} | {' | '.join(cells)} |")
    smaller = t_interval(
        [one - other for one, other in zip(found[FULL, FALL], found[ONE_BACKBONE, FALL], strict=True)]
    )
    text += ["", f"The fall is smaller with distilling by {smaller} points, paired over the seeds."]
    return "\n".join(text) + "\n"


def main() -> None:
    """Run what the record lacks, and write the page."""
    torch.set_num_threads(1)
    planned = [(row, seed, settings_hash(row.load(seed))) for row in ROWS for seed in SEEDS]
    done = {line["settings"]: line for line in read_results(RECORD)}
    for row, seed, settings in planned:
        if settings not in done:
            done[settings] = run(row, seed)
            with RECORD.open("a") as file:
                file.write(json.dumps(done[settings]) + "\n")
            print(row.label, seed, done[settings]["measures"], flush=True)
    PAGE.write_text(page([done[settings] for _, _, settings in planned]))


if __name__ == "__main__":
    main()
