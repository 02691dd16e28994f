"""Reads and checks what a finished run left in its folder, for reports and comparisons."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perennial.foundation.errors import StateError
from perennial.server.journal import EVENTS, read_events
from perennial.server.measures.record import Measures, read_measures

Model = TypeVar("Model", bound=BaseModel)

Measured = Annotated[
    float | None, AfterValidator(lambda value: value if value is not None and math.isfinite(value) else None)
]
"""A figure that may be absent; NaN and infinity mean that nothing was measured."""


def _check_triangle(matrix: list[list[float | None]]) -> list[list[float | None]]:
    for number, row in enumerate(matrix, 1):
        if len(row) != number:
            raise ValueError(f"row {number} has {len(row)} columns, expected {number}")
    return matrix


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


class SiteSummary(_Record):
    samples: int = 0
    rounds: int = 0
    """Rounds whose model holds an update of this site."""
    rejected: int = 0
    refused: int = 0
    accuracy: Measured = None
    """Of the global model, on what the site held out."""


class Claim(_Record):
    """The exact privacy claim, in the words of privacy/statement.py."""

    unit: str
    adversary: str
    relation: str
    mechanism: str
    bayesian_relation: str = "one typical site is replaced by another"
    not_covered: list[str] = []
    warnings: list[str] = []


class Epsilon(_Record):
    """Privacy loss; value is the worst case over sites, absent where no noise was added.

    bayesian: the Bayesian figure beside it. claim: what is hidden, from whom, how, and what is not covered.
    """

    value: Measured
    unit: str
    delta: Measured = None
    accountant: str
    per_site: dict[str, Measured] = {}
    bayesian: Measured = None
    claim: Claim | None = None


class SignsOfStopping(_Record):
    """Signs, in words, that the model had learnt nothing after one task."""

    task: int
    signs: list[str]


class StoppedLearning(_Record):
    """Tasks after which learning had stopped. to_try: settings that may help."""

    tasks: list[SignsOfStopping]
    to_try: list[str]


class Summary(_Record):
    """The content of summary.json. Blocks of single methods stay as they are, in `model_extra`.

    bytes_up, bytes_down: of the rounds. task_end_bytes_up, task_end_bytes_down: of the ends of tasks beside
    them; absent from a run that did not count them.
    """

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)
    experiment: str
    seed: int
    engine: str
    accuracy_matrix: Annotated[list[list[Measured]], Field(min_length=1), AfterValidator(_check_triangle)]
    """Row t, column i: accuracy on task i after task t; row t has t columns."""
    average_accuracy: list[Measured]
    average_incremental_accuracy: Measured
    final_accuracy: Measured
    balanced_accuracy: list[Measured] = []
    """After each task, with every class counted alike."""
    unbalanced: bool = False
    """Whether that is the figure to report."""
    forgetting: Measured
    backward_transfer: Measured
    rounds: int
    bytes_up: int
    bytes_down: int
    task_end_bytes_up: int | None = None
    task_end_bytes_down: int | None = None
    seconds: float
    model_sha256: str
    model_file_sha256: str | None = None
    measured_on: str | None = None
    """SHA-256 of the server's test samples and their classes; None where the server has none."""
    data_sha256: str | None = None
    group_models_sha256: dict[str, str] = {}
    personal_models_sha256: dict[str, str] = {}
    sites: dict[str, SiteSummary]
    stopped_learning: StoppedLearning | None = None
    """Tasks after which the model was found to have learnt nothing."""
    epsilon: Epsilon | None
    classes: list[str] = []
    tasks: list[list[str]] = []
    federated_accuracy: list[Measured] = []
    federated_interval: list[tuple[float, float] | None] = []
    federated_noise: list[Measured] = []
    versions: dict[str, str] = {}

    @property
    def final_balanced(self) -> float | None:
        return self.balanced_accuracy[-1] if self.balanced_accuracy else None

    @property
    def headline(self) -> tuple[str, float | None]:
        """(name, value) of the measure to report first."""
        if self.unbalanced and self.final_balanced is not None:
            return "balanced accuracy", self.final_balanced
        return "accuracy", self.final_accuracy


class SiteReason(_Record):
    site: str
    reason: str = ""


class RoundEvent(_Record):
    """One `round` line of events.jsonl; `round` counts over all tasks."""

    task: int
    round: int
    participants: list[str] = []
    dropped: list[SiteReason] = []
    refused: list[SiteReason] = []
    absent: list[str] = []
    skipped: bool = False
    train_loss: Measured = None
    accuracy: Measured = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: Measured = None


@dataclass(frozen=True)
class Run:
    """A run read from its folder. rounds: in order, each once. notes: remarks of the journal, in order."""

    folder: Path
    summary: Summary
    rounds: Sequence[RoundEvent]
    notes: Sequence[str]
    started: datetime | None
    experiment_text: str
    measures: Measures | None = None

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks of summary.json that only some methods write, by name."""
        return self.summary.model_extra or {}

    @property
    def withdrawn(self) -> str:
        """What was taken out of the model, and whether anybody measured it since, in words; '' if nothing."""
        names = find_withdrawn(self.blocks.get("analytic"))
        if not names:
            return ""
        said = f"Withdrawn: {', '.join(names)}."
        if self.measures is None and self.summary.final_accuracy is None:
            said += " Nobody has measured the model since; judge it by: perennial evaluate RUN DATA."
        return said


def find_withdrawn(block: object) -> list[str]:
    """What was taken out of a model, by the block `analytic` of its summary."""
    if not isinstance(block, Mapping):
        return []
    whole, in_part = (block.get(key) or () for key in ("withdrawn", "withdrawn_in_part"))
    return [*map(str, whole), *(f"records of {site}" for site in in_part)]


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises StateError naming the file that is missing or damaged, and what to do."""
    if not folder.is_dir():
        raise StateError(f"{folder}: no such run folder; name one that `perennial run` has written")
    summary = read_summary(folder)
    experiment_text = _read(folder / "experiment.yaml").decode("utf-8", errors="replace")
    path = folder / EVENTS
    _read(path)
    rounds: dict[int, RoundEvent] = {}
    notes: list[str] = []
    started = None
    for event in read_events(folder):
        match event:
            case {"event": "run_started", **facts} if started is None:
                started = _time(facts.get("time"))
            case {"event": "round", **facts}:
                entry = parse_content(RoundEvent, facts, f"{path}, round {facts.get('round')}")
                rounds[entry.round] = entry
            case {"event": "note", **facts}:
                notes.append(str(facts.get("text", "")))
            case {"event": "resumed", **facts}:
                notes.append(f"Resumed at round {facts['round']}." if "round" in facts else "Resumed.")
    in_order = [rounds[number] for number in sorted(rounds)]
    return Run(folder, summary, in_order, notes, started, experiment_text, read_measures(folder))


def read_summary(folder: Path) -> Summary:
    """Read summary.json of a run folder. Raises StateError as read_run does."""
    path = folder / "summary.json"
    data = _read(path)
    try:
        content = json.loads(data)
    except ValueError as error:
        raise StateError(
            f"{path}: damaged or cut short ({error}); resume the run to write it again"
        ) from None
    return parse_content(Summary, content, str(path))


def parse_content(model: type[Model], content: Any, where: str) -> Model:
    """Parse content as a `model`. Raises StateError naming where, the faulty fields and what was found."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}, found {str(fault['input'])[:60]!r}"
            for fault in error.errors(include_url=False)[:3]
        )
        raise StateError(
            f"{where}: not as a run writes it ({faults}); resume the run to write it again"
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        folder = path.parent
        if not any((folder / name).exists() for name in ("experiment.yaml", "summary.json", EVENTS)):
            raise StateError(
                f"{folder}: no run is in it; name a folder that `perennial run` has written"
            ) from None
        experiment = "" if (folder / "experiment.yaml").exists() else "EXPERIMENT "
        raise StateError(
            f"{path}: missing; a report needs a finished run: `perennial run {experiment}--resume {folder}` "
            f"finishes it; one of a deployment `perennial deploy resume {folder.name}`"
        ) from None
    except OSError as error:
        raise StateError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _time(value: Any) -> datetime | None:
    """A journal time: seconds since 1970, or ISO 8601; None when it is neither."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        return datetime.fromisoformat(str(value))
    except (ValueError, OverflowError, OSError):
        return None
