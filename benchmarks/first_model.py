"""What the first model of `perennial init` reaches on data written out as files, beside two rivals.

`python -m benchmarks.first_model [MINUTES]` adds the runs that are missing, until so many minutes
are over, and writes results/first_model.jsonl and .md. Nothing is set by hand: the experiment is the one that
init writes, with another seed. The pooled logistic regression sees the same training and validation samples
in one place, raw and standardised; the best site alone is the best of such regressions on one site's samples
each, by the judged samples, which favours it. A number beside a set is how many of its samples were taken.

Prediction sets need calibration records, which init does not set apart: a second run of the same file has
COVERAGE asked for and SET_APART of the records that it would have learnt from.
"""

import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks.environment import machine
from benchmarks.table import RESULTS, ROOT
from perennial.cli.init import init_command
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import forget_simulated, simulated_federation
from perennial.data.config import DataConfig
from perennial.data.pack import load_pack
from perennial.data.samples import Samples, fill_missing
from perennial.engine.run import run_in_process
from perennial.server.measures.figure import wilson

RECORD, PAGE = RESULTS / "first_model.jsonl", RESULTS / "first_model.md"
DATA = ROOT.parent / "shared" / "data"
SEEDS = (1000, 1001, 1002)
COVERAGE, SET_APART = 0.9, 0.3


def _folders(root: Path, x: np.ndarray, names: list[str]) -> Path:
    """Images (n, H, W) or (n, H, W, 3) in a folder for each name."""
    for number, (pixels, name) in enumerate(zip(x, names, strict=True)):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.squeeze()).save(folder / f"{number}.png")
    return root


def _table(root: Path, x: np.ndarray, y: np.ndarray) -> Path:
    with open(root / "genes.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"gene {number}" for number in range(x.shape[1])), "class"])
        rows.writerows([*values, f"type {label}"] for values, label in zip(x.tolist(), y, strict=True))
    return root / "genes.csv"


def _spread(y: np.ndarray, most: int) -> np.ndarray:
    """Rows evenly over the set, at most so many."""
    return np.arange(len(y))[:: max(1, len(y) // most)][:most]


def _heart(root: Path) -> Path:
    path = root / "heart.csv"
    path.write_bytes((DATA / "heart_disease_4_hospitals.csv").read_bytes())
    return path


def _coil(root: Path) -> Path:
    data = np.load(DATA / "coil20.npz")
    return _folders(root / "coil", data["x"], [f"object {label}" for label in data["y"]])


def _orl(root: Path) -> Path:
    data = np.load(DATA / "orl_faces.npz")
    return _folders(root / "orl", data["x"], [f"person {label}" for label in data["y"]])


def _genes(name: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        data = np.load(DATA / "tabular_multiclass.npz")
        return _table(root, data[f"{name}_x"], data[f"{name}_y"])

    return write


def _pack(file: str, **more: str) -> Samples:
    """The training part of a packed set, images channels first."""
    return load_pack(DataConfig.model_validate({"source": "pack", "path": str(DATA / file), **more})).train


def _images(part: Samples, rows: np.ndarray) -> np.ndarray:
    return part.x[torch.from_numpy(rows)].permute(0, 2, 3, 1).numpy()


def _fashion(root: Path) -> Path:
    part = _pack("fashion_mnist.webp.zip")
    y = part.y.numpy()
    rows = _spread(y, 2000)
    return _folders(root / "fashion", _images(part, rows), [f"kind {label}" for label in y[rows]])


def _cifar(root: Path) -> Path:
    part = _pack("cifar100.webp.zip")
    y = part.y.numpy()
    rows = np.flatnonzero(y < 10)[:1500]
    return _folders(root / "cifar", _images(part, rows), [f"kind {label}" for label in y[rows]])


def _ham(pack: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        part = _pack(pack, patient="lesion")
        assert part.site is not None and part.groups is not None
        rows = _spread(part.y.numpy(), 1600)
        with open(root / "list.csv", "w", newline="") as file:
            listed = csv.writer(file)
            listed.writerow(["path", "label", "site", "lesion"])
            for row, pixels in zip(rows.tolist(), _images(part, rows), strict=True):
                Image.fromarray(pixels).save(root / f"{row}.png")
                site, lesion = part.site_names[int(part.site[row])], part.groups[row].tobytes().hex()[:16]
                listed.writerow([f"{row}.png", f"class {int(part.y[row])}", site, lesion])
        return root / "list.csv"

    return write


SETS: dict[str, Callable[[Path], Path]] = {
    "heart disease, 4 hospitals (920)": _heart,
    "gene expression, khan (63)": _genes("khan"),
    "methylation, christensen (217)": _genes("christensen"),
    "ORL (400)": _orl,
    "COIL-20 (1,440)": _coil,
    "Fashion-MNIST (2,000)": _fashion,
    "HAM10000, 32 px, 4 clinics (1,600)": _ham("ham10000_32.webp.zip"),
    "CIFAR-100, 10 classes (1,500)": _cifar,
    "HAM10000, 128 x 96, 4 clinics (1,600)": _ham("ham10000_128.webp.zip"),
}


def measured(name: str, seed: int) -> dict[str, Any]:
    """One run of what init writes, and the two rivals on the same samples."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "data").mkdir()
        data = SETS[name](root / "data")
        init_command(data, root / "first", "")
        file, runs = root / "first" / "experiment.yaml", root / "runs"
        # two sets written as genes.csv are one experiment to the cache, which does not look at paths
        forget_simulated()
        started = time.perf_counter()
        run_in_process(RunSettings(str(file), f"seed={seed}", "first", str(runs)))
        seconds = time.perf_counter() - started
        summary = json.loads((runs / "first" / "summary.json").read_text())
        told = json.loads((runs / "first" / "measures.json").read_text())
        experiment = load_experiment(file, seed=seed)
        pooled, alone = _rivals(experiment)
    chosen = summary["head_choice"][0]
    return {
        "set": name,
        "maps": "auto",
        "seed": seed,
        "first": [told["balanced_accuracy"]["value"], told["macro_auroc"]["value"]],
        "calibration_error": told["calibration"]["scaled_error"]["value"],
        "pooled": pooled,
        "alone": alone,
        "chosen": f"{chosen['head']} {chosen['shrinkage']:g} on {' and '.join(chosen['maps'])}",
        "judged": told["samples"],
        "seconds": round(seconds),
    }


def sets_measured(name: str, seed: int) -> dict[str, Any]:
    """How often prediction sets hold the true class, over judged samples of classes that have a threshold."""
    with tempfile.TemporaryDirectory() as place:
        asked = f"seed={seed};evaluation.coverage={COVERAGE};data.calibration_fraction={SET_APART}"
        root = Path(place)
        (root / "data").mkdir()
        init_command(SETS[name](root / "data"), root / "first", "")
        run_in_process(RunSettings(str(root / "first" / "experiment.yaml"), asked, "sets", str(root)))
        run = root / "sets"
        told = json.loads((run / "measures.json").read_text())
    sets = told["prediction_sets"]
    judged = {each["name"]: each["samples"] for each in told["classes"]}
    held = {
        label: (each["samples"], judged[label], each["covered"]["value"])
        for label, each in sets["thresholds"].items()
        if each["informative"] and judged[label]
    }
    return {
        "set": name,
        "seed": seed,
        "maps": "auto",
        "asked": COVERAGE,
        "classes": len(judged),
        "held": held,
        "mean_size": sets["mean_size"],
        "void": sets["void"],
    }


def _rivals(experiment: Any) -> tuple[list[float], list[float]]:
    """[balanced accuracy, mean AUROC] of the regression on all samples, and on the best site's alone."""
    federation = simulated_federation(experiment)
    first = next(iter(federation.sites.values()))
    fill = federation.mean if federation.fill is None else federation.fill
    x = first.x.clone().float()
    if x.ndim == 2:
        fill_missing(x, fill)
    x = x.flatten(1).double().numpy()
    test = federation.test
    if test is not None:
        judged = test.x[test.test].float()
        if judged.ndim == 2:
            fill_missing(judged, fill)
        x_test, y_test = judged.flatten(1).double().numpy(), test.y[test.test].numpy()
    else:
        rows = torch.cat([site.test for site in federation.sites.values()])
        x_test, y_test = x[rows.numpy()], first.y[rows].numpy()
    parts = {
        name: torch.cat([site.train, site.validation]).numpy() for name, site in federation.sites.items()
    }
    every = np.concatenate(list(parts.values()))
    y = first.y.numpy()
    pooled = _regression(x[every], y[every], x_test, y_test)
    alone = [_regression(x[rows], y[rows], x_test, y_test) for rows in parts.values() if len(rows)]
    return pooled, max(alone)


def _regression(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> list[float]:
    if len(np.unique(y)) < 2:
        return [1 / len(np.unique(y_test)), 0.5]
    mean, spread = x.mean(axis=0), x.std(axis=0)
    scale = np.where(spread > 0, spread, 1.0)
    x, x_test = (x - mean) / scale, (x_test - mean) / scale
    if x.shape[1] > len(x):
        # the same regression, whose weights lie in the span of its samples
        _, _, basis = np.linalg.svd(x, full_matrices=False)
        x, x_test = x @ basis.T, x_test @ basis.T
    model = LogisticRegression(max_iter=200).fit(x, y)
    shares = model.predict_proba(x_test)
    held = {int(label): place for place, label in enumerate(model.classes_)}
    areas = [
        roc_auc_score(y_test == label, shares[:, held[label]]) if label in held else 0.5
        for label in np.unique(y_test).tolist()
        if len(np.unique(y_test)) > 1
    ]
    answers = model.classes_[shares.argmax(axis=1)]
    recalls = [float((answers[y_test == label] == label).mean()) for label in np.unique(y_test)]
    return [float(np.mean(recalls)), float(np.mean(areas))]


Measurement = Callable[[str, int], dict[str, Any]]


def _missing(done: list[dict[str, Any]]) -> Iterator[tuple[Measurement, str, int]]:
    first = {(row["set"], row["seed"]) for row in done if "first" in row and "maps" in row}
    sets = {(row["set"], row["seed"]) for row in done if "held" in row}
    for seed in SEEDS:
        for measure, there in ((measured, first), (sets_measured, sets)):
            yield from ((measure, name, seed) for name in SETS if (name, seed) not in there)


def read() -> list[dict[str, Any]]:
    """The runs that were recorded."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def write_page(done: list[dict[str, Any]]) -> None:
    """Write the table of what was recorded, misses and all."""
    lines = [
        "# The first model of init",
        "",
        "Written by `python -m benchmarks.first_model`; data written out as files, `perennial "
        "init` and nothing else. Percent; balanced accuracy and mean AUROC on the held-out fifth, means over "
        "seeds. A mark says that the first model is more than 1 point below pooled logistic regression on "
        "the raw values, or below the best site alone. Maps listed: what init wrote before `features: auto`, "
        "without the patches' symmetries to choose among, on the same samples.",
        "",
        "| set | seeds | first model | AUROC | maps listed | AUROC | pooled, raw | AUROC "
        "| best site alone | calibration error | chosen (first seed) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name in SETS:
        rows = [row for row in done if row["set"] == name and "maps" in row and "first" in row]
        if not rows:
            continue
        listed = [row["first"] for row in done if row["set"] == name and "maps" not in row and "first" in row]
        former = [f"{100 * statistics.fmean(row[i] for row in listed):.1f}" if listed else "" for i in (0, 1)]
        first, pooled, alone = (
            [statistics.fmean(row[key][i] for row in rows) for i in (0, 1)]
            for key in ("first", "pooled", "alone")
        )
        least = [max(pooled[i] - 0.01, alone[i]) for i in (0, 1)]
        shares, areas = (f"{100 * first[i]:.1f}{' (below)' * (first[i] < least[i])}" for i in (0, 1))
        errors = [row["calibration_error"] for row in rows if row["calibration_error"] is not None]
        error = statistics.fmean(errors) if errors else None
        shown = "not fitted" if error is None else f"{100 * error:.1f}{' (above 5)' * (error > 0.05)}"
        seeds = ", ".join(str(row["seed"]) for row in rows)
        lines.append(
            f"| {name} | {seeds} | {shares} | {areas} | {former[0]} | {former[1]} "
            f"| {100 * pooled[0]:.1f} | {100 * pooled[1]:.1f} | {100 * alone[0]:.1f} "
            f"| {shown} | {rows[0]['chosen']} |"
        )
    absent = [
        name
        for name in SETS
        if not any(row["set"] == name and "maps" in row and "first" in row for row in done)
    ]
    lines += [
        "",
        f"Not run yet: {'; '.join(absent) or 'none'}. Regression on a network's features and a trained "
        "learner are not among the rivals. Of few judged samples even true probabilities show an error.",
    ]
    lines += ["", *_sets_section(done)]
    lines += ["", f"Machine: {machine()}. Versions: torch {torch.__version__}, NumPy {np.__version__}.", ""]
    PAGE.write_text("\n".join(lines))


def _sets_section(done: list[dict[str, Any]]) -> Iterator[str]:
    """How often prediction sets held the true class; for the sets of data that were run with them."""
    yield "## Prediction sets"
    yield ""
    yield (
        f"The same files with `evaluation.coverage: {COVERAGE}` and `data.calibration_fraction: "
        f"{SET_APART}`, so that fewer records train. A class with too few calibration records is in every "
        "set. The shares are of judged records of the other classes: over all of them, with a 95 % interval "
        "(Wilson), and of the class that was held least often. With n calibration records of a class up to "
        "1 / (n + 1) more than was asked for may be held on average."
    )
    yield ""
    columns = "classes with a threshold | judged | set holds the class | least, of one class | mean size"
    yield f"| set | seeds | {columns} |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    absent = []
    for name in SETS:
        rows = [row for row in done if row["set"] == name and "held" in row]
        if not rows:
            absent.append(name)
            continue
        of_class: dict[str, tuple[int, int]] = {}
        for row in rows:
            for label, (_, judged, share) in row["held"].items():
                right, all_ = of_class.get(label, (0, 0))
                of_class[label] = right + round(share * judged), all_ + judged
        seeds = ", ".join(str(row["seed"]) for row in rows)
        size = statistics.fmean(row["mean_size"] for row in rows)
        judged = sum(all_ for _, all_ in of_class.values())
        shown, least = "none", ""
        if of_class:
            figure = wilson(sum(right for right, _ in of_class.values()), judged)
            assert figure.value is not None and figure.low is not None and figure.high is not None
            shown = f"{100 * figure.value:.1f} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"
            right, all_ = min(of_class.values(), key=lambda counts: counts[0] / counts[1])
            least = f"{100 * right / all_:.1f} of {all_}"
        yield (
            f"| {name} | {seeds} | {len(of_class)} of {rows[0]['classes']} | {judged} "
            f"| {shown} | {least} | {size:.1f} |"
        )
    yield ""
    yield f"Not run with prediction sets yet: {'; '.join(absent) or 'none'}."


def main() -> None:
    """Add what is missing and write the page."""
    until = time.monotonic() + 60 * float(sys.argv[1] if len(sys.argv) > 1 else 20)
    done = read()
    for measure, name, seed in _missing(done):
        if time.monotonic() > until:
            break
        # a process for each, because sites in one process remember the classes of a former set
        with get_context("spawn").Pool(1) as process:
            done.append(process.apply(measure, (name, seed)))
        with open(RECORD, "a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        write_page(done)
        print(done[-1], flush=True)


if __name__ == "__main__":
    main()
