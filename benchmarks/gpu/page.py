"""The results of GPU boxes: a file of lines for each machine, and a page written from it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"
GOAL = 25_000
"""Images a second of ResNet-18 on 32 x 32 images, batches of 128, that one large GPU should train."""


def slug(machine: str) -> str:
    """A machine's name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")[:60]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; [] where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def as_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line for each run, and where they ran."""
    lines = [
        "# Runs on a GPU box"
        if not entries[0]["tiny"]
        else "# A trial in miniature: these figures mean nothing",
        "",
        f"Written by `python -m benchmarks.gpu run`. Goal: {GOAL:,} images a second of ResNet-18.",
        "",
        "| run | what came out |",
        "| --- | --- |",
        *(f"| {entry['run']} | {in_words(entry['found'])} |" for entry in entries),
        "",
    ]
    versions = sorted({f"{name} {number}" for entry in entries for name, number in entry["versions"].items()})
    lines.append(f"Measured on: {entries[0]['machine']}; {', '.join(versions)}.")
    return "\n".join(lines) + "\n"


def in_words(found: Mapping[str, Any]) -> str:
    """What a reader looks for in one run."""
    if "images_per_second" in found:
        remarks = "".join(f"; {line}" for line in found["remarks"])
        apart = f"update {found['update_apart_from_plain_steps']:.1e} from that of plain steps"
        return f"{found['images_per_second']:,.0f} images a second; {apart}{remarks}"
    if "average_incremental_accuracy" in found:
        accuracy, mean = found["final_accuracy"], found["average_incremental_accuracy"]
        return f"accuracy {100 * accuracy:.1f} %, over tasks {100 * mean:.1f} %, {found['seconds']:.0f} s"
    return f"{found['seconds']:.2f} s, {found['steps']} steps, accuracy {100 * found['accuracy']:.1f} %"
