"""Run folders as a server leaves them, made by hand, and pages taken apart."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)' {}"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def round_event(number: int, task: int, **changes: Any) -> dict[str, Any]:
    event = {
        "event": "round",
        "task": task,
        "round": number,
        "participants": ["north", "south"],
        "dropped": [],
        "refused": [],
        "absent": [],
        "skipped": False,
        "train_loss": 1.0 / number,
        "accuracy": None,
        "bytes_up": 2_000_000,
        "bytes_down": 1_000_000,
        "seconds": 0.5,
    }
    return event | changes


def write_run(
    folder: Path, events: Sequence[dict[str, Any]] | None = None, yaml: str = "name: small\n", **changes: Any
) -> Path:
    """A run folder: three tasks, two sites, three rounds. changes replace or add keys of summary.json."""
    summary = {
        "experiment": "small",
        "seed": 1,
        "engine": "in-process",
        "accuracy_matrix": [[0.9], [0.6, 0.8], [0.5, 0.7, 0.9]],
        "average_accuracy": [0.9, 0.7, 0.7],
        "average_incremental_accuracy": 0.766667,
        "final_accuracy": 0.7,
        "forgetting": 0.25,
        "backward_transfer": -0.25,
        "rounds": 3,
        "bytes_up": 6_000_000,
        "bytes_down": 3_000_000,
        "seconds": 72.4,
        "model_sha256": "c0ffee",
        "sites": {
            "north": {"samples": 300, "rounds": 3, "rejected": 0, "refused": 0},
            "south": {"samples": 100, "rounds": 1, "rejected": 1, "refused": 1},
        },
        "epsilon": None,
        "classes": ["a", "b", "c"],
        "tasks": [["a"], ["b"], ["c"]],
        "federated_accuracy": [0.85, None, 0.65],
        "versions": {"torch": "2.13.0"},
    }
    if events is None:
        late = [{"site": "south", "reason": "no answer within 60 s"}]
        policy = [{"site": "south", "reason": "policy.min_samples: 50"}]
        events = [
            {"event": "run_started", "time": "2026-11-21T03:31:09+00:00"},
            round_event(1, 1),
            {"event": "from the future", "anything": 1},
            round_event(2, 2, participants=["north"], dropped=late, accuracy=0.6, skipped=True),
            round_event(3, 3, participants=["north"], refused=policy, train_loss=float("nan")),
            {"event": "note", "text": "south reconnected"},
            {"event": "resumed", "round": 2},
        ]
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "experiment.yaml").write_text(yaml)
    return folder


@dataclass
class Drawn:
    """One chart as it stands on a page: what its shapes tell, what is written in it, and its description."""

    tells: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    description: str = ""


class Page(HTMLParser):
    """A page as a browser splits it: elements with their attributes, visible text, scripts, charts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.charts: dict[str, Drawn] = {}
        self._in = ""
        self._chart: Drawn | None = None
        self._words: list[str] | None = None
        self.feed(path.read_bytes().decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag in {"script", "style"}:
            self._in = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "figure":
            self._chart = self.charts[str(found["id"]).removeprefix("chart-")] = Drawn()
        if self._chart is not None:
            if tag == "svg" and found.get("role") == "img":
                self._chart.description = str(found["aria-label"])
            self._words = {"title": self._chart.tells, "text": self._chart.texts}.get(tag)
            if self._words is not None:
                self._words.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag == self._in else self._in
        self._words = None
        if tag == "figure":
            self._chart = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif not self._in:
            self.text += data
        if self._words:
            self._words[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def sections(self) -> list[str]:
        return [str(attributes["id"]) for attributes in self.all("section")]


def every_block(site: str) -> dict[str, Any]:
    pixel = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    tried = {"maps": [site], "head": site, "shrinkage": 0.1, "value": 0.9}
    tried |= {"interval": [0.8, 0.95], "end_of_grid": False}
    heads = {"own": [3, 1, 0], "federated": [4, 2, 1], "personal": [4, 1, 1]}
    return {
        "own_heads": {
            site: {
                "lambda": 0.1,
                "train": 20,
                "validation": 5,
                "total": [5, 3, 2],
                "right": heads,
                "missing": [site],
            }
        },
        "personalised_accuracy": {site: [0.5, None, 0.9], "other": 0.8},
        "contribution": {
            site: {"share": 0.3, "low": 0.1, "high": 0.4, "flag": site},
            "other": {"share": 0.7},
        },
        "map_choice": [tried],
        "head_choice": [tried],
        "bounds": {site: {"scaled": 2, "capped": 0}},
        "cross_site": {
            "features": 4,
            "sites": {
                site: {
                    "apart": 0.5,
                    "skill": 0.4,
                    "given": 0.1,
                    "marked": site,
                    "benefit": {"other": 0.2},
                },
                "other": {"benefit": {site: -0.1}},
            },
        },
        "digest": {"stored": 12, site: {"tasks": [1, 2]}, "per_site": {site: {"digests": 4, site: 0.5}}},
        "attention": {site: {site: 1.0}, "head.bias": {"other": 0.2}},
        "clusters": {site: {"x": 0.0, "y": 1.0, "cluster": 0}, "other": {"x": 1, "y": 0, "cluster": site}},
        "attacks": [{"name": site, "figures": {site: 0.53}, "images": [pixel]}],
    }
