"""What defaults do to an unusual honest site: `python -m benchmarks.honest_hospitals`.

Ten kinds of unusual site, and none, in ten divisions of digits and of skin lesions (8 x 8 pixels), each with
a number of sites, a skew and draws of its own. The last site is the unusual one. Every case makes

- a run of averaging in tasks of two classes with the default bounds; where one of them changed anything, the
  same run without bounds; and how well both models do on the unusual site's kind of records, which no site
  trained on;
- the cross-site table of closed form after each task, as the run's journal has it.

Divisions are independent and each counts once, so that intervals are exact. Writes a line a case to
results/honest_hospitals.jsonl, and honest_hospitals.md; cases that are there already are kept.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from benchmarks.distinguishing import clopper_pearson
from benchmarks.environment import machine, versions
from perennial.config.run import APP_ROOT, RunSettings
from perennial.data.config import DataConfig
from perennial.data.pack import load_pack
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.foundation.streams import stream
from perennial.learning.analytic.cross_site import cross_site
from perennial.learning.analytic.solve import Sums
from perennial.learning.analytic.statistics import Collector
from perennial.learning.batches import TrainingSet
from perennial.models.feature_maps.ball import on_grid
from perennial.models.feature_maps.random_relu import RandomReLU
from perennial.models.saved import GLOBAL_MODEL, load_saved

RESULT = Path(__file__).with_name("results") / "honest_hospitals.jsonl"
PAGE = RESULT.with_suffix(".md")
SKIN = APP_ROOT.parents[1] / "shared" / "data" / "ham10000_32.webp.zip"
SIDE, WIDTH, LEAST, EACH = 8, 256, 10, 300
NO_BOUNDS = "bounds={norm_multiple: null, share: 1}"
HARM = 0.02
"""Accuracy that a default may cost an unusual site."""


@dataclass(frozen=True)
class Division:
    """One way in which records are dealt out. alpha: of the Dirichlet draws of each class over the sites."""

    seed: int
    sites: int
    alpha: float


DIVISIONS = tuple(
    Division(4000 + number, sites, alpha)
    for number, (sites, alpha) in enumerate(
        [(4, 100), (5, 0.5), (6, 1), (7, 100), (8, 0.3), (10, 0.5), (12, 1), (15, 100), (18, 0.5), (20, 1)]
    )
)


@dataclass(frozen=True)
class Records:
    """x: (n, C, 8, 8) uint8. y: (n,) int64."""

    x: Tensor
    y: Tensor

    def at(self, rows: Tensor) -> "Records":
        return Records(self.x[rows], self.y[rows])


def digits() -> Records:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    x = torch.tensor(found.images * 255 / 16).round().to(torch.uint8)
    return Records(x[:, None], torch.tensor(found.target).long())


def skin() -> Records:
    """At most EACH lesions of a class, by a fixed draw, shrunk to 8 x 8."""
    source = load_pack(DataConfig.model_validate({"source": "pack", "path": str(SKIN)})).train
    order = torch.from_numpy(stream(1, "honest-hospitals").permutation(len(source.y)))
    rows = torch.cat([order[source.y[order] == label][:EACH] for label in source.y.unique()])
    x = source.x[rows].float()
    return Records(avg_pool2d(x, x.shape[-1] // SIDE).round().to(torch.uint8), source.y[rows].long())


DATA: Mapping[str, Callable[[], Records]] = {"digits": digits, "skin": skin}


def _of_camera(x: Tensor) -> Tensor:
    """Darker middle tones, stronger first channel, and a little blur."""
    light = (x.float() / 255) ** 1.8 * 255
    light[:, 0] *= 1.15
    return (0.7 * light + 0.3 * avg_pool2d(light, 3, 1, 1)).clamp(0, 255).round().to(torch.uint8)


def _nearer(x: Tensor) -> Tensor:
    """The middle 6 x 6 pixels, drawn out to 8 x 8."""
    grown = interpolate(x[..., 1:-1, 1:-1].float(), size=SIDE, mode="bilinear")
    return grown.round().to(torch.uint8)


LOOKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "inverted": lambda x: 255 - x,
    "turned": lambda x: x.rot90(1, (2, 3)),
    "dim": lambda x: (x.float() * 0.3).to(torch.uint8),
    "other camera": _of_camera,
    "other scale": _nearer,
}
OWN, MISSING, FEW, MANY, HABITS = (
    "a class of its own",
    "a class missing",
    "ten samples",
    "a hundred times more",
    "other labels for 10 % of a class",
)
KINDS = ("nobody", *LOOKS, OWN, MISSING, FEW, MANY, HABITS)


def dealt(data: Records, division: Division, kind: str) -> tuple[list[Records], Records, Records]:
    """(training records of each site, test records, test records of the last site's kind)."""
    sites, classes = division.sites, int(data.y.max()) + 1
    draws = stream(division.seed, "honest-hospitals", sites)
    order = draws.permutation(len(data.y))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    y, special = data.y.numpy(), int(np.bincount(data.y.numpy()[rest]).argsort()[::-1][1])
    if kind == MANY:
        few = len(rest) // (99 + sites)
        cuts = [few * number for number in range(1, sites)]
        own = [part.tolist() for part in np.split(rest, cuts)]
    else:
        while True:
            own = [[] for _ in range(sites)]
            for label in range(classes):
                mine = rest[y[rest] == label]
                cuts = (np.cumsum(draws.dirichlet([division.alpha] * sites))[:-1] * len(mine)).astype(int)
                for site, part in enumerate(np.split(mine, cuts)):
                    own[site] += part.tolist()
            if min(map(len, own)) >= LEAST:
                break
    last = own[-1]
    if kind == OWN:
        gathered = [row for site in own for row in site if y[row] == special]
        own = [[row for row in site if y[row] != special] for site in own]
        own[-1] += gathered
    elif kind == MISSING:
        own[-1] = [row for row in last if y[row] != special]
    elif kind == FEW:
        own[-1] = draws.permutation(last)[:LEAST].tolist()
    parts = [data.at(torch.tensor(rows)) for rows in own]
    held = torch.isin(data.y[torch.from_numpy(test)], parts[-1].y)
    kept = data.at(torch.from_numpy(test))
    theirs = kept.at(held.nonzero().flatten())
    if kind in LOOKS:
        parts[-1] = Records(LOOKS[kind](parts[-1].x), parts[-1].y)
        theirs = Records(LOOKS[kind](theirs.x), theirs.y)
    elif kind == HABITS:
        labels, mine = parts[-1].y.clone(), (parts[-1].y == special).nonzero().flatten()
        labels[mine[: max(1, len(mine) // 10)]] = (special + 1) % classes
        parts[-1] = Records(parts[-1].x, labels)
    return parts, kept, theirs


def experiment(folder: Path, parts: Sequence[Records], test: Records, seed: int) -> Path:
    """Writes the records and an experiment of them."""
    sites = np.repeat(np.arange(len(parts)), [len(part.y) for part in parts])
    names = np.array([f"site-{number}" for number in range(len(parts))])
    classes = int(test.y.max()) + 1
    np.savez(
        folder / "records.npz",
        x=torch.cat([part.x for part in parts]).numpy(),
        y=torch.cat([part.y for part in parts]).numpy(),
        site=sites,
        site_names=names,
        x_test=test.x.numpy(),
        y_test=test.y.numpy(),
        site_test=np.arange(len(test.y)) % len(parts),
    )
    settings = {
        "name": "honest-hospitals",
        "seed": seed,
        "data": {"source": "npz", "path": str(folder / "records.npz"), "partition": {"kind": "natural"}},
        "tasks": {"count": classes // 2, "rounds": 4, "order": "natural"},
        "model": {"name": "mlp"},
        "learner": {
            "preset": "none",
            "epochs": 2,
            "batch_size": 32,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "memory": {"selection": "herding", "per_class": 20},
        },
        "strategy": "fedavg",
        "evaluation": {"federated": False, "measures": False},
    }
    path = folder / "honest.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def averaged(path: Path, theirs: Records, last: str, *overrides: str) -> dict[str, Any]:
    """One run: who was left out or bounded, and how the model does on the unusual site's kind of records."""
    with tempfile.TemporaryDirectory() as runs:
        summary = run_in_process(RunSettings(str(path), json.dumps(overrides), runs=runs, device="cpu"))
        saved = load_saved(next(Path(runs).glob(f"*/{GLOBAL_MODEL}")))
        journal = next(Path(runs).glob("*/events.jsonl")).read_text()
    rounds = [event for event in map(json.loads, journal.splitlines()) if event["event"] == "round"]
    left = {entry["site"] for event in rounds for entry in event["dropped"]}
    inputs = TrainingSet(theirs.x, theirs.y, saved.inputs.mean, saved.inputs.std)
    with torch.no_grad():
        right = saved.classifier(inputs.floats(theirs.x)).argmax(1) == theirs.y
    met: Any = summary["bounds"]
    return {
        "accuracy": summary["final_accuracy"],
        "own": float(right.double().mean()),
        "left out": sorted(left),
        "bounded": {site: counts for site, counts in met.items() if any(counts.values())},
        "last bounded": any(met.get(last, {}).values()),
        "model": summary["model_sha256"],
    }


def marks(parts: Sequence[Records], seed: int) -> list[list[str]]:
    """The sites that the cross-site table marks, after each task of two classes."""
    maps = RandomReLU(WIDTH, tuple(parts[0].x.shape[1:]), seed, unit_length=False)
    classes = max(int(part.y.max()) for part in parts) + 1
    features = [on_grid(maps(part.x.float() / 255)) for part in parts]
    found = []
    for known in (*range(2, classes - 1, 2), classes):
        sums = {}
        for number, (part, values) in enumerate(zip(parts, features, strict=True)):
            here = part.y < known
            if here.any():
                collector = Collector(WIDTH, range(known))
                collector.add(values[here], part.y[here])
                sums[f"site-{number}"] = Sums.of(collector.finish())
        found.append(sorted(cross_site(sums).marked))
    return found


def case(name: str, data: Records, division: Division, kind: str) -> dict[str, Any]:
    parts, test, theirs = dealt(data, division, kind)
    last = f"site-{division.sites - 1}"
    with tempfile.TemporaryDirectory() as folder:
        path = experiment(Path(folder), parts, test, division.seed)
        bounded = averaged(path, theirs, last)
        free = averaged(path, theirs, last, NO_BOUNDS) if bounded["bounded"] else bounded
    return {
        "data": name,
        "division": division.seed,
        "sites": division.sites,
        "alpha": division.alpha,
        "kind": kind,
        "bounded": bounded,
        "free": {key: free[key] for key in ("accuracy", "own", "model")},
        "marks": marks(parts, division.seed),
    }


def planned() -> Iterator[tuple[Division, str, str]]:
    """(division, data, kind), whole divisions one after the other."""
    for division in DIVISIONS:
        for name in DATA:
            yield from ((division, name, kind) for kind in KINDS)


def share(hits: int, of: int) -> str:
    """A count with its exact 95 % interval in per cent."""
    low, high = clopper_pearson(hits, of, 0.025)
    return f"{hits} of {of} ({100 * float(low):.0f} to {100 * float(high):.0f} %)"


def row(kind: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """What became of one kind of site in all divisions of one kind of data."""

    def last(line: Mapping[str, Any]) -> str:
        return f"site-{line['sites'] - 1}"

    lost = [line["free"]["own"] - line["bounded"]["own"] for line in lines]
    ever = [{site for after in line["marks"] for site in after} for line in lines]
    cells = [
        kind,
        share(sum(bool(line["bounded"]["left out"]) for line in lines), len(lines)),
        f"{sum(line['bounded']['last bounded'] for line in lines)}",
        f"{100 * mean(line['bounded']['own'] for line in lines):.1f}",
        f"{100 * mean(line['free']['own'] for line in lines):.1f}",
        f"{100 * max(lost):+.1f}",
        share(sum(one > HARM for one in lost), len(lines)),
        share(sum(last(line) in named for line, named in zip(lines, ever, strict=True)), len(lines)),
        share(sum(bool(named - {last(line)}) for line, named in zip(lines, ever, strict=True)), len(lines)),
    ]
    return f"| {' | '.join(cells)} |"


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The committed page of the cases that there are."""
    columns = (
        "the last site",
        "divisions with a site left out",
        "last site bounded",
        "its accuracy, default bounds",
        "no bounds",
        "most lost",
        "divisions where more than 2 points were lost",
        "last site marked",
        "another site marked",
    )
    text = [
        "# What defaults do to unusual honest sites",
        "",
        f"`python -m benchmarks.honest_hospitals`: {len(lines)} of {len(list(planned()))} cases. "
        f"Divisions of {DIVISIONS[0].sites} to {DIVISIONS[-1].sites} sites, Dirichlet 0.3 to 100, seeds "
        f"{DIVISIONS[0].seed} to {DIVISIONS[-1].seed}, on which nothing was chosen; each counts once, and "
        "intervals are exact (95 %). All sites are honest. *Bounded*: an update was shortened or a count "
        "capped in any round. *Marked*: by the cross-site table of closed form, after any task "
        f"({WIDTH} random features); what stands beside a mark says what else may be the reason. Accuracy is "
        "that of the model on test records of the last site's kind and classes, per cent.",
        "",
    ]
    for name in DATA:
        of_data = [line for line in lines if line["data"] == name]
        text += [f"## {name}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        by_kind = {kind: [line for line in of_data if line["kind"] == kind] for kind in KINDS}
        text += [*(row(kind, found) for kind, found in by_kind.items() if found), ""]
    return "\n".join([*text, f"Versions: {versions()}. Machine: {machine()}.", ""])


def main() -> None:
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.exists() else []
    done = {(line["division"], line["data"], line["kind"]) for line in lines}
    held = {name: read() for name, read in DATA.items() if name == "digits" or SKIN.exists()}
    for division, name, kind in planned():
        if name in held and (division.seed, name, kind) not in done:
            lines.append(case(name, held[name], division, kind))
            with RESULT.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(division, name, kind, lines[-1]["bounded"]["own"], lines[-1]["free"]["own"], flush=True)
    replace_file(PAGE, page(lines).encode(), mode=0o644)


if __name__ == "__main__":
    main()
