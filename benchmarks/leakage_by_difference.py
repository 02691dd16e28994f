"""What two releases tell of the one record in which a site's data differ.

`python -m benchmarks.leakage_by_difference` asks a real ClientApp for its sums of features before
and after one record more came (growing data, in a second run), and to take one record back from a finished
run, and writes results/leakage_by_difference.json and .md. Features are the pixels, an image therefore.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attacked_hospital import PIXELS, Hospital
from benchmarks.environment import versions
from benchmarks.twins.records import Records
from perennial.client import site as client_site
from perennial.client.withdrawn_records import withdrawn
from perennial.data.config import DataConfig
from perennial.data.digits import load_digits
from perennial.foundation.errors import PerennialError
from perennial.foundation.files import replace_file
from perennial.protocol.messages import StatisticsReply, StatisticsRequest

RESULTS = Path(__file__).parent / "results" / "leakage_by_difference"
CLASSES = [f"c{label}" for label in range(5)]
OPEN: dict[str, Any] = {"answers": ["statistics"], "max_runs": 100}
DEMAND = OPEN | {"require_privacy": "sample", "max_epsilon": 8.0, "delta": 1e-4}
CLEAR: dict[str, Any] = {"strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.1}}
NOISE = CLEAR | {
    "strategy": {"name": "analytic", "head": "gaussian"},
    "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": 1.0},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in the clear": (OPEN, CLEAR),
    "in the clear, floor of 20": (OPEN | {"min_samples": 20}, CLEAR),
    "under noise": (OPEN, NOISE),
    "in the clear, protection demanded": (DEMAND, CLEAR),
    "under noise, protection demanded": (DEMAND, NOISE),
}
"""Name -> policy of the site, and what the experiment has."""


@dataclass(frozen=True)
class Found:
    """likeness: correlation of what the difference says with the record's image; None: nothing was told.

    charges: lines of the ledger. refusal: of the release that would have told it, '' without one.
    """

    likeness: float | None
    charges: int
    refusal: str


def digits(of_each: int = 30) -> tuple[Records, np.ndarray]:
    """A site's images by class, and one image of the first class that is not among them."""
    source = load_digits(DataConfig(source="digits")).train
    x, y = source.x[:, 0].numpy(), source.y.numpy()
    rows = [row for label in range(5) for row in np.flatnonzero(y == label)[:of_each]]
    return Records(x[rows], np.array([f"c{y[row]}" for row in rows])), x[np.flatnonzero(y == 0)[of_each]]


def hospital(folder: Path, policy: dict[str, Any], changes: dict[str, Any]) -> Hospital:
    """A site with these images in arrays of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "source": "folder",
        "classes": CLASSES,
        "image_size": 8,
        "color": "gray",
        "normalise": {"mean": 0.3, "std": 0.38},
        "test_fraction": 0,
        "validation_fraction": 0,
    }
    block = {
        "data": data,
        "model": {"name": "features", "features": ["inputs"]},
        "learner": None,
        "tasks": {"count": 1, "rounds": 1, "order": "natural"},
        "evaluation": {"central": False, "federated": False},
    }
    return Hospital(folder, policy, digits()[0].write(folder), **(block | changes))


def sums(site: Hospital, run: str) -> StatisticsReply | None:
    """The sums of task 1 in a run."""
    client_site._processes.clear()
    features = site.site.models.fixed_features().content
    stamp: dict[str, Any] = site.stamp() | {"run": run, "split_key": "11" * 32}
    reply = site.ask(StatisticsRequest(**stamp, of_task=1, features=features))
    return reply if isinstance(reply, StatisticsReply) else None


def of_two_sums(policy: dict[str, Any], changes: dict[str, Any], folder: Path) -> Found:
    """Two runs, between which one record came: the difference of the sums of its class."""
    site = hospital(folder, policy, changes)
    before = sums(site, "0" * 16)
    records, image = digits()
    records.with_one(image, "c0").write(folder)
    after = sums(site, "1" * 16)
    charges = len(site.site.identity.ledger.entries())
    if before is None or after is None:
        return Found(None, charges, site.refusal)
    moved = (after.statistics["sums"] - before.statistics["sums"])[0, :PIXELS]
    return Found(alike(moved, torch.from_numpy(image).flatten()), charges, "")


def of_one_withdrawn(policy: dict[str, Any], changes: dict[str, Any], folder: Path) -> Found:
    """One record taken back from a finished run: its part in the sums."""
    site = hospital(folder, policy, changes)
    held = site.site
    row = held.data.task_indices("train", 0, 1)[:1]
    try:
        taken = withdrawn(held, "0" * 16, row, folder / "records.safetensors", {})
    except PerennialError as error:
        return Found(None, len(held.identity.ledger.entries()), str(error))
    likeness = alike(taken[1].sums[0, :PIXELS], held.data.x[row].flatten())
    return Found(likeness, len(held.identity.ledger.entries()), "")


ATTACKS = {"two versions of growing data": of_two_sums, "one record withdrawn": of_one_withdrawn}


def alike(found: Tensor, image: Tensor) -> float:
    """Correlation of two images."""
    return float(torch.corrcoef(torch.stack([found.double(), image.double()]))[0, 1])


def page(content: dict[str, Any]) -> str:
    """The table as Markdown."""
    used = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "# What a difference tells of one record",
        "",
        f"`python -m benchmarks.leakage_by_difference`; {used}. Digits, features are the pixels.",
        "",
        "| case | release | likeness to the record's image | lines in the ledger | refused |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in content["rows"]:
        likeness = "-" if row["likeness"] is None else f"{row['likeness']:.2f}"
        refusal = row["refusal"].split(";")[0] or "-"
        lines.append(f"| {row['attack']} | {row['case']} | {likeness} | {row['charges']} | {refusal} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run each attack in each case and write both files."""
    rows: list[dict[str, Any]] = []
    for attack, run in ATTACKS.items():
        for case, (policy, changes) in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                found = run(policy, changes, Path(folder) / "site")
            rows.append({"attack": attack, "case": case} | vars(found))
    content = {"versions": versions(), "rows": rows}
    replace_file(RESULTS.with_suffix(".json"), (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), page(content).encode(), mode=0o644)


if __name__ == "__main__":
    main()
