"""Several settings over several seeds: runs in parallel processes, and one table of means and intervals."""

import itertools
import json
import math
import multiprocessing
import operator
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from perennial.config.experiment import Experiment, load_experiment, require_experiment
from perennial.config.run import RunSettings, find_experiment, resolve_runs_folder
from perennial.config.yaml_file import read_yaml
from perennial.engine.run_folders import create_run_folder, has_finished_round, locate_run_folder
from perennial.engine.sweep_table import Sweep
from perennial.foundation.errors import ConfigError, PerennialError, StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.plugins import InUse, Named, find_in_use, restore_in_use, use_also

MOST_RUNS = 1000
RUNS = "runs.json"
"""Beside a table: label -> seed -> name of the run's folder. The sweep with the same is the same sweep."""


@dataclass(frozen=True)
class Planned:
    """One run of a sweep. changes: what the sweep sets, KEY=VALUE. folder: of the run."""

    changes: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...]
    experiment: Experiment
    folder: Path


def run_sweep(
    experiment: Experiment | Mapping[str, Any] | Path | str,
    *,
    seeds: Sequence[int] | str | None = None,
    sweep: Mapping[str, Sequence[Any]] | Sequence[str] = (),
    overrides: Sequence[str] = (),
    name: str = "",
    runs: Path | str = "runs",
    workers: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    plugins: Sequence[Named] = (),
    say: Callable[[str], None] | None = None,
) -> Sweep:
    """Run every setting of a sweep with every seed, and put the results into one table.

    What has finished already is taken as it is, and what was stopped goes on, so the same call can be made
    again, and writes its own table again; the table of another sweep of this name gets a number. All settings
    are read before the first run starts. A run's model does not depend on `workers`.

    Args:
        experiment: an object, a mapping with the keys of a file, or the path of a file.
        seeds: numbers, or text: `1:5` for 1 to 5, `1,3`; None: the experiment's own.
        sweep: key of the experiment -> its values; or texts `KEY=VALUE,VALUE`. Several keys: each with each.
        overrides: KEY=VALUE of all runs.
        name: begins the names of the run folders; default: the experiment's.
        runs: the folder of the run folders.
        workers: runs at the same time, each in a process of its own; None: one a processor.
        device: auto, cpu, cuda or cuda:N.
        overwrite: make runs again that are there.
        plugins: as for run(); what the processes of the runs can import.
        say: told a line about each run that ends.

    Raises:
        ConfigError: a setting is wrong, or a run folder holds a run of other settings.
        StateError: some runs failed; the others are kept.
    """
    with use_also(plugins), tempfile.TemporaryDirectory(prefix="perennial-sweep-") as scratch:
        path = _as_path(experiment, Path(scratch))
        if seeds is not None and any(each.partition("=")[0].strip() == "seed" for each in overrides):
            raise ConfigError("--set: found seed with --seeds; allowed one of them")
        numbers = None if seeds is None else parse_seeds(seeds)
        planned = plan_sweep(path, numbers, _parse_axes(sweep), overrides, name, runs, overwrite)
        failed: list[str] = []
        found = _run_all(path, planned, workers, device, overwrite, say, failed)
        table = _collect(planned, found, name or planned[0].experiment.name, runs)
        if failed:
            raise StateError(
                f"{len(failed)} of {len(planned)} runs failed; {table.folder} has the table of the others, "
                f"and the same command goes on with these: {'; '.join(failed)}"
            )
        return table


def plan_sweep(
    path: Path,
    seeds: Sequence[int] | None,
    axes: Mapping[str, Sequence[str]],
    overrides: Sequence[str],
    name: str,
    runs: Path | str,
    overwrite: bool = False,
) -> list[Planned]:
    """Every run of a sweep, read and checked.

    Raises ConfigError where a setting is wrong, or a folder holds a run of other settings or data.
    """
    from perennial.server.summary import hash_data
    from perennial.strategies.factory import build_strategy

    if "seed" in axes:
        raise ConfigError("--sweep: found seed; allowed: --seeds, whose runs become one row")
    many = math.prod(map(len, axes.values())) * (len(seeds) if seeds else 1)
    if many > MOST_RUNS:
        raise ConfigError(f"--sweep, --seeds: found {many} runs, allowed up to {MOST_RUNS}")
    planned: list[Planned] = []
    for values in itertools.product(*axes.values()):
        changes = tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        for seed in seeds or [None]:
            all_changes = (*overrides, *changes, *([] if seed is None else [f"seed={seed}"]))
            experiment = load_experiment(path, [*all_changes])
            build_strategy(experiment.strategy.name, experiment.strategy.parameters)
            slug = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(values)).strip("-.")[:60]
            parts = [name or experiment.name, *([slug] if slug else []), f"s{experiment.seed}"]
            folder = locate_run_folder("-".join(parts), runs)
            planned.append(Planned(changes, experiment.seed, all_changes, experiment, folder))
    names = [each.folder.name for each in planned]
    if twice := {each for each in names if names.count(each) > 1}:
        raise ConfigError(f"--sweep: two settings would have the run folder {min(twice)}; allowed: one")
    compute_hash = cache(hash_data)
    for each in planned:
        there = each.folder / "experiment.yaml"
        if overwrite or not has_finished_round(each.folder):
            continue
        if read_yaml(there) != yaml.safe_load(each.experiment.to_yaml()):
            raise ConfigError(
                f"{each.folder}: holds a run of other settings; allowed: another --name, or --overwrite"
            )
        summary, data = each.folder / "summary.json", each.experiment.data.path
        known = json.loads(summary.read_bytes()).get("data_sha256") if summary.exists() else None
        if known is not None and known != compute_hash(data):
            raise ConfigError(
                f"{each.folder}: its run read other data than {data} holds now; allowed: another --name, or "
                "--overwrite"
            )
    return planned


def parse_seeds(seeds: Sequence[int] | str) -> list[int]:
    """Seeds from numbers, or from text such as `1:5` (1 to 5) and `1,3,7`. Raises ConfigError."""
    if not isinstance(seeds, str):
        try:
            found = [*map(operator.index, seeds)]
        except TypeError:
            found = []
    else:
        found = []
        for part in seeds.split(","):
            ends = part.strip().split(":")
            if not 1 <= len(ends) <= 2 or not all(end.isascii() and end.isdigit() for end in ends):
                raise ConfigError(f"--seeds: found {seeds!r}, allowed for example 1:5 or 1,3,7")
            if int(ends[-1]) - int(ends[0]) >= MOST_RUNS:
                raise ConfigError(f"--seeds: found {seeds!r}, allowed up to {MOST_RUNS} seeds")
            found += range(int(ends[0]), int(ends[-1]) + 1)
    if not found or len({*found}) < len(found) or min(found) < 0:
        raise ConfigError(f"--seeds: found {seeds!r}, allowed different numbers from 0 on, for example 1:5")
    return found


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """(key, values) of KEY=VALUE,VALUE; a comma inside brackets belongs to a value."""
    key, sign, rest = text.partition("=")
    values, depth = [""], 0
    for character in rest:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    values = [*map(str.strip, values)]
    if not key.strip() or not sign or not all(values) or len(set(values)) < len(values):
        raise ConfigError(f"--sweep: found {text!r}, allowed for example strategy=fedavg,scaffold")
    return key.strip(), values


def _parse_axes(sweep: Mapping[str, Sequence[Any]] | Sequence[str]) -> dict[str, list[str]]:
    if isinstance(sweep, Mapping):
        return {key: _format_values(key, values) for key, values in sweep.items()}
    axes: dict[str, list[str]] = {}
    for text in [sweep] if isinstance(sweep, str) else sweep:
        key, values = parse_sweep(text)
        if key in axes:
            raise ConfigError(f"--sweep: {key} is there twice; allowed once, with all its values")
        axes[key] = values
    return axes


def _format_values(key: str, values: Any) -> list[str]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"sweep: {key}: found {values!r:.80}, allowed a list of values")
    try:
        return [value if isinstance(value, str) else json.dumps(value) for value in values]
    except TypeError as error:
        raise ConfigError(
            f"sweep: {key}: {error}; allowed: values that a file can hold, for runs are processes"
        ) from None


def _as_path(experiment: Experiment | Mapping[str, Any] | Path | str, scratch: Path) -> Path:
    require_experiment(experiment, "run_sweep")
    if isinstance(experiment, Path | str):
        return find_experiment(Path(experiment)).resolve()
    path = scratch / "experiment.yaml"
    try:
        text = (
            experiment.to_yaml()
            if isinstance(experiment, Experiment)
            else yaml.safe_dump({"name": "experiment", **experiment})
        )
    except yaml.YAMLError as error:
        raise ConfigError(
            f"run_sweep: experiment: {error}; allowed: values that a file can hold, for runs are processes "
            "of their own"
        ) from None
    path.write_text(text, encoding="utf-8")
    return path


def _run_all(
    path: Path,
    planned: Sequence[Planned],
    workers: int | None,
    device: str,
    overwrite: bool,
    say: Callable[[str], None] | None,
    failed: list[str],
) -> dict[Path, dict[str, Any]]:
    """Folder -> summary of each run that there is in the end. failed: where those that failed are named."""
    found, waiting = dict[Path, dict[str, Any]](), list[Planned]()
    for each in planned:
        summary = each.folder / "summary.json"
        if summary.exists() and not overwrite:
            found[each.folder] = json.loads(summary.read_text(encoding="utf-8"))
        else:
            waiting.append(each)
    make_folder(planned[0].folder.parent)
    count = min(max(1, workers or os.cpu_count() or 1), max(1, len(waiting)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context) as pool:
        futures = {
            pool.submit(
                _run_one, str(path), each.overrides, str(each.folder), device, find_in_use(), overwrite
            ): each
            for each in waiting
        }
        try:
            for future in as_completed(futures):
                each = futures[future]
                try:
                    found[each.folder] = future.result()
                    accuracy = found[each.folder]["final_accuracy"]
                    told = "not measured" if accuracy is None else f"{100 * accuracy:.1f} %"
                except BrokenProcessPool:
                    raise StateError(
                        "the process of a run ended before its run did: killed, out of memory, or a script "
                        'called run_sweep outside `if __name__ == "__main__":`; the same command goes on'
                    ) from None
                except PerennialError as error:
                    failed.append(f"{each.folder.name}: {error}")
                    told = str(error)
                if say is not None:
                    say(f"{len(found) + len(failed)} of {len(planned)}: {each.folder.name}: {told}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _run_one(
    path: str, overrides: Sequence[str], folder: str, device: str, plugins: InUse, overwrite: bool
) -> dict[str, Any]:
    """One run in a process of its own, from its checkpoint if it was stopped."""
    from perennial.engine.run import load_resumed_settings, run_in_process

    where = Path(folder)
    with restore_in_use(plugins):
        if has_finished_round(where) and not overwrite:
            return run_in_process(load_resumed_settings(None, [], None, where, device))
        with create_run_folder(where.name, where.parent, overwrite=True):
            return run_in_process(
                RunSettings(path, json.dumps([*overrides]), where.name, str(where.parent), device=device)
            )


def _collect(
    planned: Sequence[Planned], found: Mapping[Path, dict[str, Any]], name: str, runs: Path | str
) -> Sweep:
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    named: dict[str, dict[str, str]] = {}
    for each in planned:
        label = ", ".join(each.changes) or each.experiment.name
        row = rows.setdefault(label, {})
        if each.folder in found:
            row[each.seed] = found[each.folder]
        named.setdefault(label, {})[str(each.seed)] = each.folder.name
    folder = _locate_table(resolve_runs_folder(runs) / f"{name}-table", named)
    make_folder(folder)
    # first, so that a table that a kill left half written is found again
    replace_file(folder / RUNS, f"{json.dumps(named, indent=1)}\n".encode(), mode=0o644)
    sweep = Sweep(rows, folder, tuple(each.folder for each in planned))
    sweep.write()
    return sweep


def _locate_table(first: Path, named: Mapping[str, Mapping[str, str]]) -> Path:
    """The folder of the table of these runs: the first, or first-2 and so on where it is another's."""
    folders = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], folders) if _is_table_of(folder, named))


def _is_table_of(folder: Path, named: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a folder holds the table of these runs, or nothing."""
    try:
        return not any(folder.iterdir()) or json.loads((folder / RUNS).read_bytes()) == named
    except FileNotFoundError:
        return not os.path.lexists(folder)
    except (OSError, ValueError):
        return False
