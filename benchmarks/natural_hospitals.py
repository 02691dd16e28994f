"""Hospitals as they are: together, without one, each alone, all data in one place, and under protection.

`python -m benchmarks natural_hospitals` runs what is missing and writes
results/natural_hospitals.jsonl, one line a run as soon as it is there, and .md. Each line has the accuracy of
one model at every hospital's own test records. White blood cells take part where blood_cells.py was given
a user's pictures.
"""

import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.environment import machine, versions
from benchmarks.intervals import half_width
from benchmarks.natural_places import PLACES, Place, blood_cells
from benchmarks.table import RESULTS
from benchmarks.tables.analytic import ONE_RELEASE
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_federation
from perennial.data.federation import SimulatedFederation
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.library import load_run

NAME, ABOUT = "natural_hospitals", "hospitals as they are, each alone and together"
SEEDS = tuple(1000 + number for number in range(5))
TOGETHER, POOLED, AVERAGED = "together", "all data in one place", "averaging"
WITHOUT, ALONE, EPSILON = "without {}", "{} alone", "together, epsilon {}"
EPSILONS = (8, 2)
GAUSSIAN = {"name": "analytic", "head": "gaussian"}
Shares = Mapping[str, Mapping[str, float]]
"""Hospital -> accuracy, balanced accuracy and number of its test records."""
Line = dict[str, Any]


def experiments(place: Place, sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Row -> its experiment without the seed. sites: names of the hospitals."""
    data = {"source": "npz", "path": str(place.path), **place.data}
    open_, noised = place.features
    closed = {
        **{"data": data, "tasks": {"count": 1, "rounds": 1}, "model": {"name": "features", **open_}},
        # fixed beforehand: one hospital alone may have no validation sample of a class
        **{"strategy": {**GAUSSIAN, "shrinkage": 0.1}, "evaluation": {"federated": False}},
    }
    one = {name: value for name, value in data.items() if name != "sites"}
    found = {
        TOGETHER: closed,
        POOLED: {**closed, "data": {**one, "sites": 1, "partition": {"kind": "iid"}}},
    }
    if place.averaged is not None:
        found[AVERAGED] = {"data": data, **place.averaged, "evaluation": {"federated": False}}
    for site in sites:
        found[WITHOUT.format(site)] = {**closed, "absence": _away([site])}
        found[ALONE.format(site)] = {**closed, "absence": _away([each for each in sites if each != site])}
    for epsilon in EPSILONS:
        found[EPSILON.format(epsilon)] = {
            **{**closed, "strategy": GAUSSIAN, "model": {"name": "features", **noised}},
            "secure": {"least": 3, "quorum": len(sites), "assumed_colluders": 1},
            "privacy": {
                **{"mode": "sample_shared", "release": "sums", "accountant": "rdp"},
                **{"noise_multiplier": ONE_RELEASE[epsilon], "noise_source": "seeded"},
            },
        }
    return found


def _away(sites: Sequence[str]) -> list[dict[str, Any]]:
    return [{"site": site, "first_round": 1} for site in sites]


def settings_of(experiment: Mapping[str, Any], seed: int) -> str:
    """SHA-256 of an experiment but for where its data lie, and its seed."""
    data = {name: value for name, value in experiment["data"].items() if name != "path"}
    return hashlib.sha256(
        json.dumps([{**experiment, "data": data}, seed], sort_keys=True).encode()
    ).hexdigest()


def run_one(experiment: Mapping[str, Any], seed: int, tests: SimulatedFederation) -> Shares:
    """What one run's model reaches at the test records of every hospital of tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.yaml"
        path.write_text(yaml.safe_dump({"name": "run", "seed": seed, **experiment}))
        run_in_process(RunSettings(str(path), runs=folder, device="cpu"))
        model = load_run(Path(folder) / "run").model
        place = [tests.classes.index(name) for name in model.classes]
        shares = {}
        for name, site in tests.sites.items():
            guessed = model.answers(site.x[site.test]).probabilities.argmax(dim=1)
            y = site.y[site.test]
            hits = (torch.tensor(place)[guessed] == y).double()
            if len(y):
                balanced = mean(float(hits[y == label].mean()) for label in y.unique())
                shares[name] = {"accuracy": float(hits.mean()), "balanced": balanced, "records": len(y)}
    return shares


def federation(experiment: Mapping[str, Any], seed: int) -> SimulatedFederation:
    """The hospitals of an experiment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.yaml"
        path.write_text(yaml.safe_dump({"name": "run", "seed": seed, **experiment}))
        return simulated_federation(load_experiment(path))


def run_missing(places: Sequence[Place], record: Path, say: Callable[[str], None] = print) -> list[Line]:
    """All lines of the places as they are now, after running those that record lacks."""
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    known, wanted = {(line["place"], line["settings"]): line for line in lines}, []
    for place in places:
        place.make(place.path)
        if not place.path.exists():
            say(f"{place.name}: left out; benchmarks.blood_cells makes {place.path}, which is not there")
            continue
        for seed in SEEDS:
            tests = federation(experiments(place, ())[TOGETHER], seed)
            for row, experiment in experiments(place, tests.site_names).items():
                settings = settings_of(experiment, seed)
                if (place.name, settings) not in known:
                    start = time.perf_counter()
                    line = {
                        **{"place": place.name, "row": row, "seed": seed, "settings": settings},
                        "hospitals": run_one(experiment, seed, tests),
                        "seconds": round(time.perf_counter() - start, 2),
                        **{"versions": versions(), "machine": machine()},
                    }
                    with record.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    known[place.name, settings] = line
                    say(f"{place.name}, {row}, seed {seed}: {line['seconds']} s")
                wanted.append(known[place.name, settings])
    return wanted


Reduced = tuple[float, float, float, str]
"""Mean of hospitals, the worst one, all records together; the worst one's name."""


def reduced(shares: Shares, measure: str) -> Reduced:
    """Of one model at all hospitals, or of one model for each; the third is meant for accuracy alone."""
    worst = min(shares, key=lambda name: shares[name][measure])
    records = sum(share["records"] for share in shares.values())
    together = sum(share[measure] * share["records"] for share in shares.values()) / records
    return mean(share[measure] for share in shares.values()), shares[worst][measure], together, worst


def arrangements(lines: Sequence[Line]) -> Iterator[tuple[str, list[Shares]]]:
    """(what is compared, hospital -> shares for each seed) of one place."""
    by_row = {(line["row"], line["seed"]): line["hospitals"] for line in lines}
    seeds = sorted({line["seed"] for line in lines})

    def own(pattern: str) -> list[Shares]:
        found = []
        for seed in seeds:
            names = by_row[TOGETHER, seed]
            rows = {name: by_row.get((pattern.format(name), seed)) for name in names}
            if all(rows.values()):
                found.append({name: row[name] for name, row in rows.items() if row})
        return found

    def whole(row: str) -> list[Shares]:
        return [by_row[row, seed] for seed in seeds if (row, seed) in by_row]

    yield TOGETHER, whole(TOGETHER)
    yield "all others, at the one that is left out", own(WITHOUT)
    yield "each alone, at its own records", own(ALONE)
    yield POOLED, whole(POOLED)
    for epsilon in EPSILONS:
        yield EPSILON.format(epsilon), whole(EPSILON.format(epsilon))
    yield AVERAGED, whole(AVERAGED)


def page(places: Sequence[Place], lines: Sequence[Line]) -> str:
    """The figures of every place, the worst hospital beside each mean."""
    seeds = ", ".join(map(str, SEEDS))
    text = [
        "# Hospitals as they are",
        "",
        f"`python -m benchmarks {NAME}`. Per cent; mean of seeds {seeds} and half its 95 % "
        "t-interval. Each hospital's figure is that of its own test records; the worst is the worst of each "
        "seed, named when it is so in most. Closed form (`strategy: analytic`, Gaussian head, one exchange) "
        "but for averaging. Epsilon at delta 1e-5 hides one training record from the server together "
        "with any one other hospital. No choice was made on these runs: features, shrinkage and rounds were "
        "fixed before; the features of skin lesions were once chosen on other divisions of the same images.",
    ]
    for place in places:
        found = [line for line in lines if line["place"] == place.name]
        if not found:
            continue
        text += ["", f"## {place.title}", ""]
        sites = found[0]["hospitals"].keys()
        planned = len(SEEDS) * len(experiments(place, list(sites)))
        if len(found) < planned:
            text += [f"**{len(found)} of {planned} runs.** The others are still to be run.", ""]
        for measure in ("accuracy", "balanced"):
            label = "balanced accuracy" if measure == "balanced" else measure
            heads = [label, "mean of hospitals", "worst hospital"]
            heads += ["all records"] if measure == "accuracy" else []
            text += [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
            for name, seeds in arrangements(found):
                if not seeds:
                    continue
                average, worst, together, names = zip(
                    *(reduced(each, measure) for each in seeds), strict=True
                )
                [(lowest, _)] = Counter(names).most_common(1)
                cells = [name, _cell(average), f"{_cell(worst)} ({lowest})"]
                cells += [_cell(together)] if measure == "accuracy" else []
                text.append(f"| {' | '.join(cells)} |")
            text.append("")
        text += [place.published] if place.published else []
    names = {line["place"] for line in lines}
    lacking = [place.name for place in places if place.name not in names and place.make != blood_cells]
    if lacking:
        text += ["", f"**Still to be run:** {', '.join(lacking)}."]
    minutes = sum(line["seconds"] for line in lines) / 60
    machines = "; ".join(sorted({line["machine"] for line in lines}))
    return "\n".join(
        [
            *text,
            "",
            f"{len(lines)} runs, {minutes:.0f} minutes of the clock, one after the other; {machines}.",
            "",
        ]
    )


def _cell(shares: Sequence[float]) -> str:
    values = [100 * share for share in shares]
    return f"{mean(values):.1f}" + (f" ± {half_width(values):.1f}" if len(values) > 1 else "")


def main(results: Path = RESULTS, say: Callable[[str], None] = print) -> None:
    """Run what is missing and write the page; runs of places that changed are dropped."""
    record = results / f"{NAME}.jsonl"
    lines = run_missing(PLACES, record, say)
    replace_file(record, "".join(json.dumps(line) + "\n" for line in lines).encode(), mode=0o644)
    (results / f"{NAME}.md").write_text(page(PLACES, lines))


if __name__ == "__main__":
    main()
