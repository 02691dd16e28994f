"""Does `perennial evaluate --against` refuse models that became worse, and let harmless updates pass?

`python -m benchmarks.gate [MINUTES]` adds the comparisons that are missing, until so many minutes
are over, and writes results/gate.jsonl and .md. Two tables are written out as files and given to `perennial
init`; nothing else is set but seeds: Fashion-MNIST in 7 x 7 means, with sites by lot and bright and dark
pictures as subgroups, and HAM10000 in 4 x 4 means of colours, nevus or not, with its four clinics, lesions as
patients and the redness of the skin as subgroups. An approved model is trained for each seed. An update is
harmless by its making (the approved run goes on with more records; or init chooses anew with another seed,
other records, more records), or made worse by a fault in what it is
trained on. What it is in truth is measured on a second file: a regression is worse by more than the margin in
some part, and a harmless update by less than half of it in each.
"""

import contextlib
import csv
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from benchmarks.environment import machine
from benchmarks.first_model import _pack
from benchmarks.table import RESULTS
from perennial.cli.check_resume import brought_up_to_date
from perennial.cli.evaluate import evaluate
from perennial.cli.init import init_command
from perennial.config.run import RunSettings
from perennial.config.simulation import forget_simulated
from perennial.engine.run import resumed_settings, run_in_process

RECORD, PAGE = RESULTS / "gate.jsonl", RESULTS / "gate.md"
SEEDS = range(2000, 2010)
SEEN = {("HAM10000, 4 x 4, 4 clinics", seed) for seed in range(2000, 2004)}
SEEN |= {("Fashion-MNIST, 7 x 7 (9,000)", 2000)}
"""Runs that had been looked at when it was decided to call an update harmless by the second file too."""
MARGIN = 0.1
COLUMNS = ("label", "site", "group", "patient")


@dataclass(frozen=True)
class Rows:
    """x: (n, D) numbers. label, site, group, patient: (n,) texts."""

    x: np.ndarray
    label: np.ndarray
    site: np.ndarray
    group: np.ndarray
    patient: np.ndarray

    def pick(self, rows: np.ndarray) -> "Rows":
        return Rows(**{name: values[rows] for name, values in vars(self).items()})

    def write(self, path: Path) -> Path:
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow([*(f"v{number}" for number in range(self.x.shape[1])), *COLUMNS])
            out.writerows(
                [*values, *texts] for values, *texts in zip(self.x.tolist(), *self.texts, strict=True)
            )
        return path

    @property
    def texts(self) -> tuple[np.ndarray, ...]:
        return self.label, self.site, self.group, self.patient


def _fashion() -> Rows:
    part = _pack("fashion_mnist.webp.zip")
    x = torch.nn.functional.avg_pool2d(part.x[:9000].float(), 4).flatten(1).round().numpy()
    dark = x.mean(axis=1)
    lot = np.random.default_rng(0).integers(3, size=len(x))
    return Rows(
        x,
        np.array([f"kind {label}" for label in part.y[:9000].tolist()]),
        np.array([f"site {number}" for number in lot]),
        np.where(dark > np.median(dark), "light", "dark"),
        np.array([f"f{place}" for place in range(len(x))]),
    )


def _ham() -> Rows:
    part = _pack("ham10000_32.webp.zip", patient="lesion")
    assert part.site is not None and part.groups is not None
    x = torch.nn.functional.avg_pool2d(part.x.float(), 8).flatten(1).round().numpy()
    saturated = (x[:, :16].mean(axis=1) - x[:, 32:].mean(axis=1)) > 30
    return Rows(
        x,
        np.where(part.y.numpy() == 5, "nevus", "other"),
        np.array(part.site_names)[part.site.numpy()],
        np.where(saturated, "red", "pale"),
        np.array([group.tobytes().hex()[:12] for group in part.groups]),
    )


SETS: dict[str, tuple[Callable[[], Rows], float, int]] = {
    "HAM10000, 4 x 4, 4 clinics": (_ham, 0.3, 10),
    "Fashion-MNIST, 7 x 7 (9,000)": (_fashion, 0.25, 5),
}
"""Each with the share of its patients of whom models are trained, and of how many seeds."""


def _relabelled(rows: Rows, here: np.ndarray, share: float, generator: np.random.Generator) -> Rows:
    """A share of the rows in here, (n,) bool, with the next class's label."""
    names = sorted(set(rows.label.tolist()))
    after = {name: names[(place + 1) % len(names)] for place, name in enumerate(names)}
    wrong = here & (generator.random(len(here)) < share)
    label = np.where(wrong, np.array([after[name] for name in rows.label.tolist()]), rows.label)
    return Rows(rows.x, label, rows.site, rows.group, rows.patient)


def _class(rows: Rows, generator: np.random.Generator) -> Rows:
    name = generator.choice(np.unique(rows.label))
    return _relabelled(rows, rows.label == name, 0.8, generator)


def _rare(rows: Rows, generator: np.random.Generator) -> Rows:
    name = generator.choice(np.unique(rows.label))
    members = np.flatnonzero(rows.label == name)
    kept = np.ones(len(rows.label), dtype=bool)
    kept[members[6:]] = False
    return rows.pick(np.flatnonzero(kept))


def _site(rows: Rows, generator: np.random.Generator) -> Rows:
    """One site wrote its numbers in another unit, in training alone."""
    names, counts = np.unique(rows.site, return_counts=True)
    x = rows.x.copy()
    x[rows.site == names[counts.argmax()]] *= 0.1
    return Rows(x, *rows.texts)


def _group(rows: Rows, generator: np.random.Generator) -> Rows:
    name = generator.choice(np.unique(rows.group))
    return _relabelled(rows, rows.group == name, 0.9, generator)


def _few(rows: Rows, generator: np.random.Generator) -> Rows:
    return rows.pick(np.sort(generator.choice(len(rows.label), 60, replace=False)))


def _shuffled(rows: Rows, generator: np.random.Generator) -> Rows:
    """Half of the labels went to other rows, as after a sort of one column."""
    moved = generator.random(len(rows.label)) < 0.9
    label = rows.label.copy()
    label[moved] = generator.permutation(label[moved])
    return Rows(rows.x, label, rows.site, rows.group, rows.patient)


REGRESSIONS = {
    "a class whose labels are mostly the next one's": _class,
    "six records of a class": _rare,
    "the largest site in another unit": _site,
    "a subgroup mostly mislabelled": _group,
    "60 records in all": _few,
    "labels moved against rows": _shuffled,
}
HARMLESS = (
    "another seed",
    "other records",
    "a fifth more records",
    "other records and another seed",
    "a tenth fewer records",
)
CONTINUED = ("continued with a tenth more records", "continued with a fifth more records")
"""Updates that choose nothing anew: `run --resume` of the approved run when its table has grown."""


OTHERS = (*HARMLESS, *REGRESSIONS)


def _train(root: Path, name: str, rows: Rows, seed: int) -> Path:
    forget_simulated()
    data = rows.write(root / f"{name}.csv")
    init_command(data, root / f"init-{name}", "")
    file = root / f"init-{name}" / "experiment.yaml"
    run_in_process(RunSettings(str(file), f"seed={seed}", name, str(root)))
    return root / name


def measured(name: str, seed: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Updates of one set against the model of one seed: the continued ones, or all others."""
    load, share, _ = SETS[name]
    rows, generator = load(), np.random.default_rng(seed)
    patients = generator.permutation(np.unique(rows.patient))
    learnt = np.isin(rows.patient, patients[: int(share * len(patients))])
    judging = np.flatnonzero(~learnt)
    half = np.isin(rows.patient, patients[int((0.8 + 0.2 * share) * len(patients)) :])
    pool = rows.pick(np.flatnonzero(learnt))
    count = len(pool.label) * 3 // 4

    def places(records: int) -> np.ndarray:
        return np.sort(generator.choice(len(pool.label), records, replace=False))

    def drawn(records: int) -> Rows:
        return pool.pick(places(records))

    def more(share: float) -> Rows:
        later = np.setdiff1d(np.arange(len(pool.label)), begun)
        return pool.pick(np.concatenate([begun, later[: round(share * count)]]))

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        rows.pick(judging[~half[judging]]).write(root / "gate.csv")
        rows.pick(judging[half[judging]]).write(root / "truth.csv")
        begun = places(count)
        first = pool.pick(begun)
        _train(root, "approved", first, seed)
        if kinds == CONTINUED:
            runs = {
                kind: _continue(root, more(share)) for kind, share in zip(CONTINUED, (0.1, 0.2), strict=True)
            }
            return [_judged(root, name, seed, kind, run) for kind, run in runs.items()]
        updates = {
            HARMLESS[0]: (first, seed + 500),
            HARMLESS[1]: (drawn(count), seed),
            HARMLESS[2]: (drawn(count * 6 // 5), seed),
            HARMLESS[3]: (drawn(count), seed + 501),
            HARMLESS[4]: (drawn(count * 9 // 10), seed),
            **{kind: (fault(drawn(count), generator), seed) for kind, fault in REGRESSIONS.items()},
        }
        return [
            _judged(root, name, seed, kind, _train(root, f"update-{number}", data, own_seed))
            for number, (kind, (data, own_seed)) in enumerate(updates.items())
        ]


def _continue(root: Path, grown: Rows) -> Path:
    """A copy of the approved run, gone on with when its table has grown."""
    forget_simulated()
    run = root / f"continued-{len(grown.label)}"
    shutil.copytree(root / "approved", run)
    table = root / "approved.csv"
    before = table.read_bytes()
    grown.write(table)
    settings = resumed_settings(None, [], None, run, "cpu")
    brought_up_to_date(run, settings.load())
    run_in_process(settings)
    table.write_bytes(before)
    return run


def _judged(root: Path, name: str, seed: int, kind: str, run: Path) -> dict[str, Any]:
    passed, truth = (_gate(root, run, file) for file in ("gate.csv", "truth.csv"))
    return {
        **{"set": name, "seed": seed, "kind": kind, "harmless": kind not in REGRESSIONS},
        **{"margin": MARGIN, "passed": passed[0], "worst": passed[1], "worst_in_truth": truth[1]},
        **{"parts": passed[2], "records": passed[3]},
    }


def _gate(root: Path, run: Path, file: str) -> tuple[bool, float, int, int]:
    """(whether it passes, the largest loss of a part, parts, records)."""
    sets = ["site_column=site", f"subgroup={{column: group, values: {json.dumps(_groups(root / file))}}}"]
    against, key, passes = root / "approved", root / "judge.key", True
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            evaluate(run, root / file, sets, against=against, margin=[str(MARGIN)], key=key)
        except typer.Exit:
            passes = False
    lines = [line for line in said.getvalue().splitlines() if line.startswith("  ")]
    losses = [float(line.split(" points")[0].split()[-1]) for line in lines]
    records = json.loads((run / "evaluations" / Path(file).stem / "measures.json").read_text())["samples"]
    return passes, min(losses), len(lines), records


def _groups(path: Path) -> list[str]:
    with open(path, newline="") as file:
        return sorted({row["group"] for row in csv.DictReader(file)})


def write_page(done: list[dict[str, Any]]) -> None:
    """The table of all updates, misses and all."""
    continued = [row for row in done if row["kind"] in CONTINUED]
    anew = [row for row in done if row["kind"] not in CONTINUED]
    harmless, worse = ([row for row in anew if row["harmless"] == kind] for kind in (True, False))
    real = [row for row in worse if row["worst_in_truth"] < -100 * MARGIN]
    true = [row for row in harmless if row["worst_in_truth"] > -50 * MARGIN]
    later = [row for row in true if (row["set"], row["seed"]) not in SEEN]
    lines = [
        "# A new model against an approved one",
        "",
        "Written by `python -m benchmarks.gate`, whose head says how. Points; margin "
        f"{100 * MARGIN:g} in every part (class, site, subgroup), said before.",
        "",
        f"- faults refused: {_refused(worse)}; of those that are worse by more than the margin on the second "
        f"file too: {_refused(real)}",
        "- updates that go on with the approved run when its table has grown refused: "
        f"{_refused(continued)}; of those that lose less than half the margin everywhere on the second file: "
        f"{_refused([row for row in continued if row['worst_in_truth'] > -50 * MARGIN])}",
        "- models that init chooses anew, on records and seeds that are as good, refused: "
        f"{_refused(harmless)}",
        f"- of those that lose less than half the margin in each part on the second file: {_refused(true)}; "
        f"in runs that nobody had looked at when this was decided: {_refused(later)}",
        "",
        "What init writes chooses maps and head anew for each model, so an update that changes nothing else "
        "can serve another site or class less well.",
        "",
        "| set | seed | update | records | parts | largest loss of a part | on the second file | verdict |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in sorted(done, key=lambda row: (not row["harmless"], row["set"], row["seed"])):
        fine = row["worst_in_truth"] > -50 * MARGIN if row["harmless"] else False
        wrong = (row["passed"] and not row["harmless"]) or (fine and not row["passed"])
        verdict = ("passed" if row["passed"] else "refused") + " (wrongly)" * wrong
        lines.append(
            f"| {row['set']} | {row['seed']} | {row['kind']} | {row['records']:,} | {row['parts']} "
            f"| {row['worst']:+.1f} | {row['worst_in_truth']:+.1f} | {verdict} |"
        )
    lines += ["", f"Machine: {machine()}. Versions: torch {torch.__version__}, NumPy {np.__version__}.", ""]
    PAGE.write_text("\n".join(lines))


def _refused(rows: list[dict[str, Any]]) -> str:
    return f"{sum(not row['passed'] for row in rows)} of {len(rows)}"


def read() -> list[dict[str, Any]]:
    """The comparisons that were recorded."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def main() -> None:
    """Compare what is missing for as long as there is time."""
    until = time.monotonic() + 60 * float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")
    for name, (_, _, count) in SETS.items():
        for seed in SEEDS[:count]:
            for kinds in (CONTINUED, OTHERS):
                held = {row["kind"] for row in read() if (row["set"], row["seed"]) == (name, seed)}
                if held.issuperset(kinds) or time.monotonic() > until:
                    continue
                rows = measured(name, seed, kinds)
                with open(RECORD, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                write_page(read())


if __name__ == "__main__":
    main()
