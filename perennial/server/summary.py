"""The results of a run, for programs and for people: model, summary.json, metrics.csv, report.html."""

import csv
import io
import json
import math
import platform
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import perennial
from perennial.foundation.files import hash_file, replace_file
from perennial.models.saved import GLOBAL_MODEL, PERSONAL_MODEL, Inputs, save_model
from perennial.privacy.entries import Entry
from perennial.protocol.tensors import hash_tensors
from perennial.server.checkpoint import load_tensors
from perennial.server.curriculum import Curriculum
from perennial.server.journal import read_events
from perennial.server.measures.record import Measures, read_measures
from perennial.server.metrics import (
    average_incremental_accuracy,
    compute_backward_transfer,
    compute_forgetting,
)
from perennial.server.preflight import open_channels
from perennial.server.run_measures import build_confidence_facts
from perennial.server.run_record import find_withdrawn
from perennial.server.stopped import suggest_settings

MODEL_HASHES = ("model_sha256", "group_models_sha256", "personal_models_sha256")
METRICS = ("round", "task", "train_loss", "accuracy", "bytes_up", "bytes_down", "seconds")


def write_results(
    curriculum: Curriculum, engine: str, inputs: Inputs, measured_on: str | None = None
) -> dict[str, Any]:
    """Write everything that a finished run leaves; returns the summary.

    inputs: what the model takes, so that its file can be used alone.
    measured_on: SHA-256 of the server's test samples, which tells runs that can be compared.
    """
    folder, position = curriculum.folder.path, curriculum.position
    measures = read_measures(folder)
    summary = summarise(curriculum, engine) | {
        "measured_on": measured_on,
        "data_sha256": hash_data(position.experiment.data.path),
        "measures": _extract_outline(measures),
    }
    curriculum.journal.write(
        "run_finished", final_accuracy=summary["final_accuracy"], seconds=summary["seconds"]
    )
    experiment = position.experiment.model_dump_json()
    save_model(
        folder / GLOBAL_MODEL,
        position.model.collect_tensors(),
        inputs,
        position.registry.classes,
        experiment,
        confidence=build_confidence_facts(
            measures,
            len(position.registry.classes),
            one_classifier=position.one_classifier,
            withdrawn=bool(find_withdrawn(summary.get("analytic"))),
        ),
    )
    summary["model_file_sha256"] = hash_file(folder / GLOBAL_MODEL)
    replace_file(folder / "metrics.csv", format_metrics_csv(read_events(folder)).encode(), mode=0o644)
    replace_file(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode(), mode=0o644)
    from perennial.server.report.write import write_report

    write_report(folder)
    return summary


def hash_data(path: str | None) -> str | None:
    """SHA-256 of the file of `data.path`; None for a folder, and where there is no file."""
    return hash_file(Path(path)) if path is not None and Path(path).is_file() else None


def _extract_outline(measures: Measures | None) -> dict[str, Any] | None:
    """The figures of measures.json that a program compares runs by."""
    if measures is None:
        return None
    calibration = measures.calibration
    figures = {
        "balanced_accuracy": measures.balanced_accuracy,
        "macro_auroc": measures.macro_auroc,
        "macro_auprc": measures.macro_auprc,
        "calibration_error": calibration.error,
        "scaled_calibration_error": calibration.scaled_error,
    }
    return {
        "headline": measures.headline,
        "source": measures.source,
        "samples": measures.samples,
        "temperature": calibration.temperature,
        **{name: figure.model_dump() for name, figure in figures.items()},
    }


def summarise(curriculum: Curriculum, engine: str) -> dict[str, Any]:
    """The content of summary.json.

    Accuracies are central if the server has a test set, otherwise the sites' pooled; null
    if nothing was measured.
    unbalanced: whether balanced_accuracy is the figure to report, because the held-out samples of the classes
    differ too much in number.
    model_sha256: of the names, shapes and values of the tensors that travel, by which runs are compared bit
    for bit. model_file_sha256 is that of model.safetensors as `sha256sum` shows it: class names, settings and
    layers that never travel are in it too.
    group_models_sha256: of the models of groups that the server keeps.
    personal_models_sha256: of the sites' own models where their folders lie in the run's, as in simulation;
    deployed sites keep theirs to themselves.
    federated_interval: 95 % of federated_accuracy, for the sampling of held-out patients and for noise.
    federated_noise: standard deviation of the noise on a count, of each task; null where it was exact.
    stopped_learning: tasks after which the model had learnt nothing, with the signs, and what
    to try; or null.
    bounds: site -> in how many rounds `bounds` scaled its update down or left it out, or capped its claim.
    bounds_set: the bounds in words; '' where none is set.
    bytes_up, bytes_down: of the rounds' tensors.
    cohort: sites that trained in one pass.
    task_end_bytes_up, task_end_bytes_down: of the tensors at the ends of tasks, which are not in the former.
    """
    position, history, schedule = curriculum.position, curriculum.history.data, curriculum.position.schedule
    by_round = list_measured_rounds(read_events(curriculum.folder.path))
    classes = position.registry.classes
    return {
        "experiment": position.experiment.name,
        "seed": position.experiment.seed,
        "engine": engine,
        "cohort": position.progress.cohort,
        **summarise_accuracy(history),
        "rounds": position.progress.round - position.progress.passed,
        "accuracy_by_round": [accuracy for accuracy, _ in by_round],
        "bytes_by_round": [sent for _, sent in by_round],
        "bytes_up": history["bytes_up"],
        "bytes_down": history["bytes_down"],
        "task_end_bytes_up": history["task_end_bytes_up"],
        "task_end_bytes_down": history["task_end_bytes_down"],
        "seconds": round(position.progress.seconds, 3),
        "model_sha256": hash_tensors(position.model.arrays),
        "group_models_sha256": {
            group: hash_tensors(arrays)
            for group, arrays in sorted(curriculum.strategy.group_models().items())
        },
        "personal_models_sha256": hash_personal_models(curriculum.folder.path),
        "sites": history["sites"],
        "stopped_learning": {"tasks": history["stopped"], "to_try": suggest_settings(position.experiment)}
        if history["stopped"]
        else None,
        "bounds": curriculum.rounds.bounds_met,
        "bounds_set": position.experiment.bounds.in_words,
        "epsilon": compute_epsilon(curriculum),
        "classes": list(classes),
        "tasks": [
            [classes[label] for label in schedule.list_classes(task)] for task in range(1, schedule.count + 1)
        ],
        **curriculum.strategy.summary_blocks(),
        "versions": {"perennial": perennial.__version__}
        | {name: version(name) for name in ("flwr", "torch", "numpy")}
        | {"python": platform.python_version()},
    }


def summarise_accuracy(history: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says of accuracy after each task. history: the data of a History."""
    matrix, averages = history["central"], history["average"]
    return {
        "accuracy_matrix": matrix,
        "average_accuracy": averages,
        "average_incremental_accuracy": average_incremental_accuracy(averages),
        "final_accuracy": averages[-1],
        "balanced_accuracy": history["balanced"],
        "unbalanced": history.get("unbalanced", False),
        "class_accuracy": history["class_accuracy"],
        "forgetting": compute_forgetting(matrix),
        "backward_transfer": compute_backward_transfer(matrix),
        "federated_accuracy": history["federated"],
        "federated_interval": history["federated_interval"],
        "federated_noise": history["federated_noise"],
    }


def list_measured_rounds(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """(accuracy, bytes that all rounds had sent by then) for each round after which it was measured."""
    found, sent = [], 0
    for event in events:
        if event["event"] == "round":
            sent += event["bytes_up"] + event["bytes_down"]
            if event["accuracy"] is not None:
                found.append((event["accuracy"], sent))
    return found


def hash_personal_models(folder: Path) -> dict[str, str]:
    """site -> SHA-256 of the tensors of its own model, for the sites whose folders lie in a run's folder."""
    return {
        path.parent.name: hash_tensors(load_tensors(path))
        for path in sorted(folder.glob(f"sites/*/{PERSONAL_MODEL}"))
    }


def extract_hashes(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes of all models of a run: equal for two runs if every model has the same bits."""
    return {name: summary[name] for name in MODEL_HASHES}


def compute_epsilon(curriculum: Curriculum) -> dict[str, Any] | None:
    """An upper bound on what each site's releases have cost in this run; None without protection.

    value and per_site are null where no noise was added. bayesian: the Bayesian figure beside the worst case;
    of the modes that noise at the sites only where their folders are here, as in simulation. claim: unit,
    adversary, relation, mechanism, and what is not covered.
    """
    experiment = curriculum.position.experiment
    privacy = experiment.privacy
    if not privacy.enabled:
        return None
    from perennial.privacy.statement import Statement, describe

    charged = curriculum.releases.list_charged()
    bayesian = _compute_bayesian(curriculum, [site for site, entries in charged.items() if entries])
    sites = len(charged) if privacy.hidden_unit == "site" else None

    @cache
    def describe_claim(releases: frozenset[tuple[Entry, int]]) -> Statement:
        return describe(
            privacy,
            [entry for entry, times in sorted(releases, key=repr) for _ in range(times)],
            units=sites,
            bayesian_epsilon=bayesian,
            also_open=open_channels(experiment),
        )

    claims = {
        site: describe_claim(frozenset(Counter(entries).items())) for site, entries in sorted(charged.items())
    }
    per_site = {site: statement.epsilon for site, statement in claims.items()}
    worst = max([describe_claim(frozenset()), *claims.values()], key=lambda statement: statement.epsilon)
    return {
        "value": _drop_nonfinite(worst.epsilon),
        "unit": privacy.hidden_unit,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
        "per_site": {site: _drop_nonfinite(value) for site, value in per_site.items()},
        "bayesian": bayesian,
        "claim": worst.to_json(),
    }


def _compute_bayesian(curriculum: Curriculum, sites: list[str]) -> float | None:
    """The largest of all sites; None where it is not asked for, or where one has none."""
    progress = curriculum.position.progress
    if not curriculum.position.experiment.privacy.bayesian:
        return None
    from perennial.learning.bayesian_estimate import read_bayesian_figure

    folder = curriculum.folder.path / "sites"
    found = [read_bayesian_figure(folder / site, progress.run) for site in sites]
    values = [figure.epsilon for figure in found if figure is not None and figure.epsilon is not None]
    return max(values) if values and len(values) == len(sites) else None


def _drop_nonfinite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def format_metrics_csv(events: list[dict[str, Any]]) -> str:
    """The content of metrics.csv: one line for each round."""
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, METRICS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(event for event in events if event["event"] == "round")
    return text.getvalue()
