"""How often the white-box audit notices what it must notice, and how often it is wrong.

`python -m benchmarks.audit_power` records three short runs, replays what was recorded with fresh
noise, honest and with one thing wrong at a time, and writes results/audit_power.json and .md.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.environment import versions
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_site_names
from perennial.engine.run import run_in_process
from perennial.engine.white_box import ledger_entries, recording_of
from perennial.foundation.files import replace_file
from perennial.privacy.attacks.white_box import Recording, findings
from perennial.privacy.witness import watching

RESULTS = Path(__file__).parent / "results" / "audit_power"
SEED, HONEST, WRONG = 20_26, 1_000, 200
"""Of the replays; replays of honest recordings, and of each wrong one."""
BASE: dict[str, Any] = {
    "seed": 3,
    "data": {"source": "digits", "sites": 5, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "evaluation": {"federated": False},
}
TRAINED: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16], "norm": "none"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "batch_size": 12},
}
RUNS: dict[str, dict[str, Any]] = {
    "sample": TRAINED
    | {"privacy": {"mode": "sample", "clip_norm": 0.05, "noise_multiplier": 1.0, "sample_rate": 0.1}},
    "client_shared": TRAINED
    | {
        "privacy": {"mode": "client_shared", "clip_norm": 0.05, "noise_multiplier": 1.0, "accountant": "rdp"},
        "secure": {"quorum": 5, "assumed_colluders": 1},
    },
    "sums": {
        "model": {"name": "features", "features": [{"name": "random", "width": 40}]},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01, "standardise": False},
        "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": 1.0},
    },
}
Replay = Callable[[Recording, np.random.Generator], Recording]


def recorded(name: str, folder: Path) -> Recording:
    """One short run, watched."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(BASE | {"name": name} | RUNS[name]))
    settings = RunSettings(str(path), name=name, runs=str(folder / "runs"), device="cpu")
    experiment = settings.load()
    with watching() as seen:
        run_in_process(settings)
    entries = ledger_entries(settings.folder(experiment))
    return recording_of(experiment, seen, entries, len(simulated_site_names(experiment)))


def honest(seen: Recording, draw: np.random.Generator) -> Recording:
    """The same releases with fresh noise and fresh batches, as claimed."""
    rate = seen.sample_rate
    drawn = [] if rate is None else [(int(draw.binomial(units, rate)), units) for _, units in seen.drawn]
    return replace(seen, noise=[draw.normal(0, seen.std, len(one)) for one in seen.noise], drawn=drawn)


def less_noise(seen: Recording, draw: np.random.Generator) -> Recording:
    """Noise times 0.9."""
    fresh = honest(seen, draw)
    return replace(fresh, noise=[0.9 * one for one in fresh.noise])


def longer_clip(seen: Recording, draw: np.random.Generator) -> Recording:
    """Contributions cut to 1.2 times the norm; those that were shorter stay."""
    at_bound = [length >= 0.999 * (seen.clip_norm or 0) for length in seen.largest]
    longer = tuple(length * (1.2 if cut else 1) for length, cut in zip(seen.largest, at_bound, strict=True))
    return replace(honest(seen, draw), largest=longer)


def uncharged(seen: Recording, draw: np.random.Generator) -> Recording:
    """One release that no ledger has."""
    (kind,) = seen.charged
    return replace(honest(seen, draw), charged={kind: seen.charged[kind] - 1})


def overlapping(seen: Recording, draw: np.random.Generator) -> Recording:
    """One record of a task is in another task of the same run and site too."""
    scope, part, members = seen.parts[0]
    place = next(i for i, (other, name, _) in enumerate(seen.parts) if other == scope and name != part)
    parts = [*seen.parts]
    one = int(draw.choice(sorted(members)))
    parts[place] = (scope, parts[place][1], parts[place][2] | {one})
    return replace(honest(seen, draw), parts=parts)


def doubled_rate(seen: Recording, draw: np.random.Generator) -> Recording:
    """Batches drawn at twice the sampling rate."""
    assert seen.sample_rate is not None
    twice = replace(seen, sample_rate=2 * seen.sample_rate)
    return replace(honest(twice, draw), sample_rate=seen.sample_rate)


def share_missing(seen: Recording, draw: np.random.Generator) -> Recording:
    """A site dropped out of each sum, and nobody added the noise that was missing.

    A sum then has one share less than the claim takes for granted.
    """
    fresh = honest(seen, draw)
    short = [together[: seen.honest - 1] for together in fresh.shares]
    return replace(fresh, shares=short)


WRONGS: dict[str, tuple[Replay, tuple[str, ...]]] = {
    "noise times 0.9": (less_noise, ("sample", "client_shared", "sums")),
    "clip norm times 1.2": (longer_clip, ("sample", "client_shared")),
    "one release uncharged": (uncharged, ("sample", "client_shared", "sums")),
    "a part counted as disjoint that is not": (overlapping, ("sums",)),
    "sampling rate doubled": (doubled_rate, ("sample",)),
    "noise of one drop-out missing": (share_missing, ("client_shared",)),
}


def measured(recordings: dict[str, Recording]) -> list[dict[str, Any]]:
    """A row for each run and each replay: in how many of them something was found."""
    rows = []
    for run, seen in recordings.items():
        draw = np.random.default_rng(SEED)
        found = sum(bool(findings(honest(seen, draw))) for _ in range(HONEST))
        rows.append({"run": run, "replay": "honest", "found": found, "of": HONEST})
        for name, (wrong, runs) in WRONGS.items():
            if run in runs:
                found = sum(bool(findings(wrong(seen, draw))) for _ in range(WRONG))
                rows.append({"run": run, "replay": name, "found": found, "of": WRONG})
    return rows


def page(content: dict[str, Any]) -> str:
    """The table as Markdown."""
    used = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "# Power of the white-box audit",
        "",
        f"`python -m benchmarks.audit_power`, seed {content['seed']}; {used}.",
        "Three short runs on digits were recorded (`sample`: DP-SGD; `client_shared`: shared noise; `sums`:",
        "noised sums of features) and replayed with fresh noise, honest or with one thing wrong. Found:",
        "replays that the tests object to. A longer clip shows where a contribution reaches the norm.",
        "",
        "| run | replay | found |",
        "| --- | --- | --- |",
        *(f"| {row['run']} | {row['replay']} | {row['found']} of {row['of']} |" for row in content["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Record, replay and write both files."""
    with tempfile.TemporaryDirectory() as folder:
        recordings = {name: recorded(name, Path(folder)) for name in RUNS}
    for name, seen in recordings.items():
        if objections := findings(seen):
            raise SystemExit(f"{name}: the recorded run itself is objected to: {objections}")
    content = {"seed": SEED, "versions": versions(), "rows": measured(recordings)}
    replace_file(RESULTS.with_suffix(".json"), (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), page(content).encode(), mode=0o644)


if __name__ == "__main__":
    main()
