"""Everything that a resumed run needs, in one file, replaced in one atomic step after each round.

The file is safetensors: model arrays and the strategy's tensors, and in its metadata one JSON object with the
position in the curriculum, the strategy's other state, the history, the journal's length and a checksum. The
file before it is kept, so that one damaged file costs one round. The frozen model of the task before, which
does not change from round to round, has a file of its own, written before the checkpoint that names it.
"""

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.config.yaml_file import validate
from perennial.foundation.errors import ConfigError, StateError, clean_text
from perennial.foundation.files import DiskWrites, replace_file
from perennial.foundation.plain import Plain, PlainObject, read_object, require_plain
from perennial.foundation.tensor_file import yield_pieces
from perennial.protocol.tensors import hash_tensors
from perennial.server.journal import Journal
from perennial.server.run_states import Progress

CHECKPOINT = "checkpoint"
"""Folder of the files below, in a run's folder."""
LATEST = "latest.safetensors"
BEFORE = "before.safetensors"
DAMAGED = "damaged.safetensors"
SCHEMA = 4
_PROGRESS = TypeAdapter(Progress)
if TYPE_CHECKING:
    StrategyState = dict[str, Any]
else:
    StrategyState = dict[str, Tensor | Plain]


class Standing(NamedTuple):
    """The part of a checkpoint about model and strategy, in the order of Checkpoint's last fields."""

    arrays: Mapping[str, Tensor]
    strategy: StrategyState


@dataclass
class Checkpoint:
    """The content of a checkpoint. experiment: its settings. arrays: the model's travelling tensors.

    path: of the file that it was read from.
    """

    progress: Progress
    experiment: PlainObject
    arrays: Mapping[str, Tensor]
    strategy: StrategyState
    path: Path = Path()

    def read_experiment(self) -> Experiment:
        """The settings as this release reads them: keys that are gone are left out. Raises StateError."""
        try:
            return validate(Experiment, self.experiment, f"{self.path}: experiment")
        except ConfigError as error:
            raise StateError(f"{error}; damaged, or begun with settings that this release lacks") from error


class CheckpointWriter:
    """Writes the checkpoints of a run, and counts its seconds from here on. settings: of the experiment.

    disk_writes: flushes checkpoints to the disk during the next round; None: each round ends with its flush.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        progress: Progress,
        journal: Journal,
        disk_writes: DiskWrites | None,
    ) -> None:
        self._folder, self._settings, self._progress, self._journal = folder, settings, progress, journal
        self._writes, self._clock = disk_writes, time.monotonic()

    def write(self, standing: Standing) -> None:
        """Replace the checkpoint by the run's present state. Raises StateError when it cannot be written."""
        now = time.monotonic()
        self._progress.seconds += now - self._clock
        self._clock = now
        if self._writes is None:
            self._progress.journal_position = self._journal.flush_to_disk()
        else:
            # the checkpoint that becomes the second newest is on the disk before the newest is replaced
            self._writes.wait()
            self._progress.journal_position = self._journal.measure_length()
        checkpoint = Checkpoint(self._progress, self._settings, *standing)
        save_checkpoint(self._folder, checkpoint, durable=self._writes is None)
        if self._writes is not None:
            self._writes.begin([self._journal.path, self._folder / LATEST])

    def wait(self) -> None:
        """Wait until the newest checkpoint is on the disk."""
        if self._writes is not None:
            self._writes.wait()


STATE = "a mapping of names to tensors, and to values that JSON can hold"
"""What the state_dict of a strategy returns."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, durable: bool = True) -> None:
    """Replace the run's checkpoint.

    durable: False leaves it to the caller to flush LATEST, before the next checkpoint.
    Raises StateError when it cannot be written; the one before stays valid.
    """
    if not isinstance(checkpoint.strategy, Mapping):
        raise StateError(f"strategy: state_dict(): returned {checkpoint.strategy!r:.80}; allowed: {STATE}")
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.arrays.items()}
    values = {}
    for name, value in checkpoint.strategy.items():
        if isinstance(value, Tensor):
            tensors[f"strategy/{name}"] = value
        else:
            values[name] = value
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {
        "schema": SCHEMA,
        "progress": vars(checkpoint.progress),
        "experiment": checkpoint.experiment,
        "strategy": values,
        "checksum": _compute_checksum(tensors),
    }
    try:
        text = json.dumps(facts)
    except TypeError as error:
        raise StateError(f"strategy: state_dict(): {error}; allowed: {STATE}") from error
    if (folder / LATEST).exists():
        _keep_latest(folder)
    replace_file(folder / LATEST, yield_pieces(tensors, {"facts": text}), durable=durable)


def load_checkpoint(folder: Path) -> tuple[Checkpoint, str]:
    """(the newest sound checkpoint, a note for the journal when it was not the newest file).

    Raises StateError naming the files when there is none.
    """
    problems = []
    for name in (LATEST, BEFORE):
        path = folder / name
        if not path.exists():
            problems.append(f"{path}: no such file")
            continue
        try:
            return _read(path), "; ".join(problems)
        except StateError as error:
            problems.append(str(error))
    raise StateError("no checkpoint to resume from: " + "; ".join(problems))


def read_cohort(folder: Path) -> int:
    """Size of the cohorts that a run's checkpoint names; 1 if there is no sound checkpoint."""
    try:
        return load_checkpoint(folder)[0].progress.cohort
    except StateError:
        return 1


def is_begun_again(run: Path) -> bool:
    """Whether a run's checkpoint says that it is to begin again, as after some withdrawals."""
    try:
        return not load_checkpoint(run / CHECKPOINT)[0].progress.finished
    except StateError:
        return False


def set_damaged_aside(folder: Path) -> None:
    """Rename a damaged newest checkpoint, for a run that continues from the one before it.

    Left where it is, it would take the place of the sound file at the next checkpoint.
    """
    latest = folder / LATEST
    with _name_failure(latest):
        if latest.exists():
            os.replace(latest, folder / DAMAGED)


def save_previous(folder: Path, sha256: str, arrays: Mapping[str, Tensor], still_named: str) -> None:
    """Keep the complete model of a finished task under its content hash, and remove those no longer named.

    still_named: the hash in the checkpoints written so far, to which a run may have to go back.
    """
    path = _locate_previous(folder, sha256)
    if not path.exists():
        replace_file(path, yield_pieces(arrays))
    # not by age: a clock that was set back makes the newest file the oldest
    needed = {path, _locate_previous(folder, still_named)}
    with _name_failure(folder):
        for old in set(folder.glob("previous-*.safetensors")) - needed:
            old.unlink(missing_ok=True)


def load_previous(folder: Path, sha256: str) -> dict[str, Tensor]:
    """Load the model that save_previous stored. Raises StateError naming the file."""
    return load_model(_locate_previous(folder, sha256), sha256)


def load_model(path: Path, sha256: str) -> dict[str, Tensor]:
    """Load the tensors of a file with this content hash. Raises StateError naming another or damaged file."""
    arrays = load_tensors(path)
    if hash_tensors(arrays) != sha256:
        raise StateError(f"{path}: damaged: its content is not what its name says")
    return arrays


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a file. Raises StateError naming one that is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: missing or damaged ({error}); resume from a copy of the run") from error


def _locate_previous(folder: Path, sha256: str) -> Path:
    return folder / f"previous-{sha256}.safetensors"


def _keep_latest(folder: Path) -> None:
    """Give the newest file its second name, before the first one is given to the file that follows it."""
    latest, before, link = folder / LATEST, folder / BEFORE, folder / f".{BEFORE}.link"
    try:
        link.unlink(missing_ok=True)
        os.link(latest, link)
        os.replace(link, before)
    except OSError:
        # a file system without hard links (exFAT, some SMB and FUSE mounts), or one that is full
        with _name_failure(before):
            link.unlink(missing_ok=True)
            data = latest.read_bytes()
        replace_file(before, data)


@contextmanager
def _name_failure(path: Path) -> Iterator[None]:
    """Raises StateError naming path for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{path}: the checkpoint could not be written ({error.strerror})") from error


def _read(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            facts = read_object((file.metadata() or {})["facts"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        checksum = _compute_checksum(tensors)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: damaged or cut short ({error})") from error
    if facts.get("schema") != SCHEMA:
        raise StateError(
            f"{path}: schema {facts.get('schema')}, written before Perennial 0.2.0 or by a later "
            f"version; this one reads {SCHEMA}: finish the run with the version that began it, or begin anew"
        )
    if facts.get("checksum") != checksum:
        raise StateError(f"{path}: damaged: the checksum of its tensors differs")

    def group(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    try:
        progress = _PROGRESS.validate_python(facts["progress"])
        experiment, strategy = require_plain(facts["experiment"]), require_plain(facts["strategy"])
    except (KeyError, ValueError) as error:
        raise StateError(f"{path}: damaged: {clean_text(str(error), 500)}") from error
    return Checkpoint(
        progress,
        experiment,
        group("model/"),
        {**strategy, **group("strategy/")},
        path,
    )


def _compute_checksum(tensors: Mapping[str, Tensor]) -> int:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].numpy().data, zlib.crc32(name.encode(), checksum))
    return checksum
