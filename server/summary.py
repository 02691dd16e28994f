"""The results of a run, for programs and for people: model, summary.json, metrics.csv, report.html."""

import csv
import io
import json
import platform
from importlib.metadata import version
from typing import Any

from safetensors.torch import save

from foundation.files import replace_file
from privacy.accountants import make_accountant
from privacy.protection import effective_multiplier
from protocol.tensors import content_sha256
from server.curriculum import Curriculum
from server.journal import read_events
from server.metrics import average_accuracy, average_incremental_accuracy, backward_transfer, forgetting

METRICS = ("round", "task", "train_loss", "accuracy", "bytes_up", "bytes_down", "seconds")


def write_results(
    curriculum: Curriculum, engine: str, constants: tuple[list[float], list[float]] | None
) -> dict[str, Any]:
    """Write everything that a finished run leaves; returns the summary. constants: (mean, std) of inputs,
    where known."""
    folder = curriculum.folder.path
    summary = summarise(curriculum, engine)
    curriculum.journal.write(
        "run_finished", final_accuracy=summary["final_accuracy"], seconds=summary["seconds"]
    )
    write_model(curriculum, constants)
    replace_file(folder / "metrics.csv", metrics_csv(read_events(folder)).encode(), mode=0o644)
    replace_file(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode(), mode=0o644)
    from server.report import write_report

    write_report(folder)
    return summary


def summarise(curriculum: Curriculum, engine: str) -> dict[str, Any]:
    """summary.json as a dict; accuracies are central where the server has a test set, else the sites'
    pooled."""
    history, schedule = curriculum.history.data, curriculum.schedule
    matrix, sizes = history["central"], history["sizes"]
    classes = curriculum.registry.classes
    federated = [
        None if row is None else average_accuracy(row, history["federated_sizes"])
        for row in history["federated"]
    ]
    return {
        "experiment": curriculum.experiment.name,
        "seed": curriculum.experiment.seed,
        "engine": engine,
        "accuracy_matrix": matrix,
        "average_accuracy": [average_accuracy(row, sizes) for row in matrix],
        "average_incremental_accuracy": average_incremental_accuracy(matrix, sizes),
        "final_accuracy": average_accuracy(matrix[-1], sizes),
        "balanced_accuracy": history["balanced"],
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
        "federated_accuracy": federated,
        "rounds": curriculum.progress.round,
        "bytes_up": history["bytes_up"],
        "bytes_down": history["bytes_down"],
        "seconds": round(curriculum.progress.seconds, 3),
        "model_sha256": content_sha256(curriculum.model.arrays),
        "sites": history["sites"],
        "epsilon": epsilon(curriculum),
        "classes": list(classes),
        "tasks": [
            [classes[label] for label in schedule.classes_of(task)] for task in range(1, schedule.count + 1)
        ],
        **curriculum.strategy.summary_blocks(),
        "versions": {name: version(name) for name in ("flwr", "torch", "numpy")}
        | {"python": platform.python_version()},
    }


def epsilon(curriculum: Curriculum) -> dict[str, Any] | None:
    """What each site's updates cost in this run, worst case; None without protection."""
    privacy = curriculum.experiment.privacy
    if privacy.mode == "none" or not privacy.noise_multiplier:
        return None
    per_site: dict[str, float] = {}
    by_rounds: dict[int, float] = {}
    for site, counters in curriculum.history.data["sites"].items():
        rounds = counters["rounds"] + counters["rejected"] + counters.get("class_sums", 0)
        if rounds not in by_rounds:
            accountant = make_accountant(privacy.accountant)
            if rounds:
                accountant.step(effective_multiplier(privacy.mode, privacy.noise_multiplier), 1.0, rounds)
            by_rounds[rounds] = accountant.epsilon(privacy.delta) if rounds else 0.0
        per_site[site] = by_rounds[rounds]
    return {
        "value": max(per_site.values(), default=0.0),
        "unit": privacy.unit,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
        "per_site": per_site,
    }


def metrics_csv(events: list[dict[str, Any]]) -> str:
    """One line for each round."""
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, METRICS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(event for event in events if event["event"] == "round")
    return text.getvalue()


def write_model(curriculum: Curriculum, constants: tuple[list[float], list[float]] | None) -> None:
    """model.safetensors: the complete final model, with what is needed to use it alone in its metadata."""
    metadata = {
        "experiment": curriculum.experiment.model_dump_json(),
        "classes": json.dumps(curriculum.registry.classes),
        "input_shape": json.dumps(curriculum.model.input_shape),
        "constants": json.dumps(constants),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in curriculum.model.frozen().items()}
    replace_file(curriculum.folder.path / "model.safetensors", save(tensors, metadata), mode=0o600)
