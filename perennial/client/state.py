"""What a site keeps on its own disk between messages, and across restarts.

Each record is one safetensors file of a version (the round it belongs to), written in one atomic step with
mode 0600.
A request of round r reads the newest record older than r, so a round that is repeated after a crash reads
what it read the first time and gives the same bits. A record of round r undoes those of later rounds: the
server has gone back, and they never were.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perennial.config.site import StateLimits
from perennial.foundation.cache import GIGABYTE, BoundedFolder
from perennial.foundation.errors import PolicyRefusal, RecordGone, StateError
from perennial.foundation.files import lock_folder, make_folder, measure_size, replace_file
from perennial.foundation.plain import PlainObject
from perennial.foundation.site_log import log
from perennial.foundation.tensor_file import yield_pieces

if TYPE_CHECKING:
    from torch import Tensor

DAY = 86_400.0
DECODED = "decoded"
"""Folder of the decoded images of the last folder that was read; they are decoded anew where it is gone."""


@dataclass(frozen=True)
class Quota:
    """The limits on what lies in the folders of a site's runs. runs: the folder of these folders."""

    runs: Path
    limits: StateLimits

    def require(self, folder: Path, coming: int) -> None:
        """Raises PolicyRefusal naming the key when a run's folder may not take so many bytes more.

        It is asked before anything is written, so a record for which there is no room leaves no trace.
        """
        others = [path for path in _list_folders(self.runs) if path != folder]
        if len(others) >= self.limits.runs and not folder.exists():
            raise PolicyRefusal(
                f"state.runs: this site keeps what it knows of {self.limits.runs} runs and no more; it can "
                "remove old ones with `perennial site clean`"
            )
        # what lies there follows from the site's records, so its size stays in the site's own log
        own, most = measure_size(folder) + coming, self.limits.gigabytes
        if own > most / 4 * GIGABYTE:
            log.warning("state.gigabytes: this run would need %.3g GB, allowed %g", own / GIGABYTE, most / 4)
            raise PolicyRefusal(
                f"state.gigabytes: this run would need more on this site's disk than {most / 4:g} GB, a "
                "quarter of what all runs may keep"
            )
        total = own + sum(measure_size(path) for path in others)
        if total > most * GIGABYTE:
            log.warning("state.gigabytes: all runs would need %.3g GB, allowed %g", total / GIGABYTE, most)
            raise PolicyRefusal(
                f"state.gigabytes: all runs together would need more on this site's disk than {most:g} GB; "
                "it can remove old ones with `perennial site clean`"
            )


def open_kept_features(state_dir: Path, limits: StateLimits) -> BoundedFolder:
    """The folder of the features of a deployed site's samples; of the maps, the longest unused goes first."""
    return BoundedFolder(state_dir / "features", limits.gigabytes / 2)


def clean(state_dir: Path, days: float, only: str = "") -> list[tuple[str, int]]:
    """Remove what the site keeps of runs in which nothing happened for so many days: (run, bytes) of each.

    only: this run and no other one, whenever it was used; the site then takes part in no masked sum of it.
    The ledger, the count of requests and everything else of the site's life stay. Raises StateError naming
    what cannot be removed.
    """
    removed = []
    for folder in _list_folders(state_dir / "runs"):
        if only and folder.name != only:
            continue
        newest = max((path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
        if not only and time.time() - newest < days * DAY:
            continue
        size = measure_size(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise StateError(f"{folder}: cannot be removed ({error.strerror})") from error
        removed.append((folder.name, size))
    return removed


def remove_decoded(state_dir: Path, days: float) -> int:
    """Remove the decoded images that nothing read for so many days; returns the bytes that this frees."""
    folder = state_dir / DECODED
    used = max((path.stat().st_mtime for path in folder.glob("*")), default=None)
    if used is None or time.time() - used < days * DAY:
        return 0
    size = measure_size(folder)
    shutil.rmtree(folder)
    return size


def _list_folders(runs: Path) -> Iterator[Path]:
    return (path for path in sorted(runs.glob("*")) if path.is_dir() and not path.is_symlink())


KEPT_VERSIONS = 3
"""The newest, the one before for a round that is repeated, and one more for a damaged server checkpoint. A
server that goes back further has lost what the site knew then."""
KEPT_MODELS = 2
START_WITHOUT = "remove it to start without it"
Part = TypeVar("Part")


class SiteState:
    """Durable records of one site in one run.

    folder: state_dir/<run token>. models: where global models of earlier tasks are kept by content; simulated
    sites share it. quota: what the folder may hold; None: anything.
    """

    def __init__(
        self, folder: Path, site: str, models: Path | None = None, quota: Quota | None = None
    ) -> None:
        self.folder = folder
        self.quota = quota
        self.site = site
        self.models = models or folder / "models"

    def put(self, name: str, version: int, tensors: Mapping[str, "Tensor"], facts: dict[str, Any]) -> None:
        """Keep a record, and forget those of later versions; on a full disk the old ones stay.

        facts: JSON-able, stored beside the tensors.
        """
        there = self._list_versions(name)
        older = [other for other in there if other < version]
        first = min(version, self._find_first(name, (older or there)[-1])) if there else version
        metadata = {"site": self.site, "facts": json.dumps(facts, sort_keys=True), "first": str(first)}
        data = list(yield_pieces(tensors, metadata))
        self._make_room(self.folder, sum(map(len, data)))
        replace_file(self._build_path(name, version), data)
        there = self._list_versions(name)
        kept = [other for other in there if other <= version][-KEPT_VERSIONS:]
        for other in there:
            if other not in kept:
                self._build_path(name, other).unlink(missing_ok=True)

    def get(self, name: str, before: int) -> tuple[dict[str, "Tensor"], dict[str, Any]] | None:
        """The newest record older than round `before`: (tensors, facts), or None where there never was one.

        Raises RecordGone when there was one and it was not kept, StateError naming the file when it is
        damaged or belongs to another site.
        """
        version = self.require(name, before)
        if version is None:
            return None
        path = self._build_path(name, version)
        tensors, metadata = read_safetensors(path)
        if metadata.get("site") != self.site:
            raise StateError(
                f"{path}: belongs to site {metadata.get('site')!r}, this is {self.site!r}; "
                "give each site its own state_dir"
            )
        return tensors, _parse_facts(path, metadata)

    def require(self, name: str, before: int) -> int | None:
        """The version that get() would read, from the names of files; None where there never was one.

        Raises RecordGone as get() does.
        """
        there = self._list_versions(name)
        older = [version for version in there if version < before]
        if older:
            return older[-1]
        if there and self._find_first(name, there[0]) < before:
            raise RecordGone(
                f"record {name!r} of run {self.folder.name}: asked for as it was before round {before}, "
                f"this site keeps the one of round {there[0]} and later ones; resume from a newer "
                f"checkpoint, or have the site remove {name}-0*.safetensors of that run to go on without"
            )
        return None

    def forget(self, name: str, after: int, before: int) -> None:
        """Remove a record's versions above `after` and below `before`: rounds that did not count."""
        for version in self._list_versions(name):
            if after < version < before:
                self._build_path(name, version).unlink(missing_ok=True)

    def put_model(self, sha256: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Keep a global model under its content hash, once."""
        path = self.models / f"{sha256}.safetensors"
        if path.exists():
            return
        data = list(yield_pieces(tensors))
        self._make_room(self.models, sum(map(len, data)))
        # simulated sites in other processes keep the same model here at the same moment
        with lock_folder(self.models):
            if path.exists():
                return
            replace_file(path, data)
            kept = sorted(self.models.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for old in kept[:-KEPT_MODELS]:
                old.unlink(missing_ok=True)

    def get_model(self, sha256: str) -> dict[str, "Tensor"] | None:
        """The global model with this content hash, or None when this site does not hold it."""
        path = self.models / f"{sha256}.safetensors"
        return read_safetensors(path)[0] if path.exists() else None

    def _make_room(self, folder: Path, size: int) -> None:
        """Raises PolicyRefusal, before anything is written, when the site's quota does not allow it."""
        if self.quota is not None:
            self.quota.require(self.folder, size)
        make_folder(folder)

    def _find_first(self, name: str, version: int) -> int:
        """The oldest version that there ever was, as a record of any version says."""
        path = self._build_path(name, version)
        first = _read(path, lambda file: file.metadata() or {}).get("first", str(version))
        if not first.isdigit():
            raise StateError(f"{path}: damaged (first: found {first!r}); {START_WITHOUT}")
        return int(first)

    def _build_path(self, name: str, version: int) -> Path:
        return self.folder / f"{name}-{version:08d}.safetensors"

    def _list_versions(self, name: str) -> list[int]:
        prefix = f"{name}-"
        found = [path.stem.removeprefix(prefix) for path in self.folder.glob(f"{prefix}*.safetensors")]
        return sorted(int(version) for version in found if version.isdigit())


def hash_records(folder: Path, before: int) -> str:
    """SHA-256 of all that get() reads in a run's folder before a round: names and contents.

    A round that is repeated after a crash finds the same. Raises StateError naming a file that is unreadable.
    """
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        name, _, version = path.stem.rpartition("-")
        if version.isdigit() and int(version) < before:
            newest[name] = path
    digest = hashlib.sha256()
    for name, path in newest.items():
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise StateError(f"{path}: cannot be read ({error.strerror})") from error
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def read_safetensors(path: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises StateError naming a file that is damaged."""
    return _read(
        path,
        lambda file: ({key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}),  # noqa: SIM118
    )


def _read(path: Path, part: Callable[[Any], Part]) -> Part:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return part(file)
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: damaged or cut short ({error}); {START_WITHOUT}") from error


def _parse_facts(path: Path, metadata: Mapping[str, str]) -> PlainObject:
    try:
        facts = json.loads(metadata["facts"])
    except (KeyError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: damaged (facts: {error!r}); {START_WITHOUT}") from error
    if not isinstance(facts, dict):
        raise StateError(f"{path}: damaged (facts: found {facts!r:.40}); {START_WITHOUT}")
    return facts
