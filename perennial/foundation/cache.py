"""Folders of what can be made again, which take only so much of the disk, and the one of this machine."""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perennial.foundation.errors import ConfigError
from perennial.foundation.files import lock_folder, measure_size

TURN = "turn"
"""File in which an entry's processes take turns to write; its time of change says when the entry was used."""
GIGABYTE = 10**9
IDLE = 3600.0
"""Seconds without use after which an entry may go for another one."""


@dataclass(frozen=True)
class BoundedFolder:
    """Entries are folders of files.

    path: of all entries; it need not exist. gigabytes: most that they take together.
    """

    path: Path
    gigabytes: float

    def mark_used(self, entry: Path) -> None:
        """Mark an entry as used now; entries that were not used for longer are removed first."""
        # an entry that is not there, or that only others may write to
        with suppress(OSError):
            os.utime(entry / TURN)

    def make_room(self, entry: Path, coming: int) -> bool:
        """Whether this many bytes more fit, after removing other entries if needed.

        The longest unused go first, and none that was used within an hour: two processes would take turns to
        remove each other's.
        """
        others = sorted((_last_use(other), other) for other in self._list_entries() if other != entry)
        sizes = {other: measure_size(other) for _, other in others}
        over = measure_size(entry) + coming + sum(sizes.values()) - self.gigabytes * GIGABYTE
        idle = [other for used, other in others if time.time() - used >= IDLE]
        if over > sum(sizes[other] for other in idle):
            return False
        for other in idle:
            if over <= 0:
                break
            _empty(other)
            over -= sizes[other]
        return True

    def remove_unused(self, days: float) -> int:
        """Empty the entries that nothing used for so many days; returns the bytes that this frees."""
        freed = 0
        for entry in self._list_entries():
            if time.time() - _last_use(entry) >= days * 86_400:
                freed += measure_size(entry)
                _empty(entry)
        return freed

    def _list_entries(self) -> Iterator[Path]:
        return (path for path in sorted(self.path.glob("*")) if path.is_dir() and not path.is_symlink())


def _list_files(entry: Path) -> Collection[Path]:
    """All files of an entry but the one in which its processes take turns."""
    return [path for path in entry.glob("*") if path.name != TURN]


def _last_use(entry: Path) -> float:
    turn = entry / TURN
    return turn.stat().st_mtime if turn.exists() else 0.0


def _empty(entry: Path) -> None:
    """Remove the files of an entry. A process that has them open goes on with what it has."""
    with lock_folder(entry):
        for path in _list_files(entry):
            path.unlink(missing_ok=True)


VARIABLE = "PERENNIAL_CACHE"
MOST = "PERENNIAL_CACHE_GIGABYTES"
GIGABYTES = 32.0
"""Features of simulated data that this machine keeps, unless MOST says otherwise."""


def find_cache_folder() -> Path:
    """$PERENNIAL_CACHE, else perennial/ in the user's cache folder. It need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perennial"


def open_machine_features() -> BoundedFolder:
    """Folder for features of simulated samples. Raises ConfigError for a bad $PERENNIAL_CACHE_GIGABYTES."""
    said = os.environ.get(MOST) or str(GIGABYTES)
    try:
        gigabytes = float(said)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < float("inf"):
        raise ConfigError(f"${MOST}: found {said!r:.40}, allowed a number of gigabytes above 0")
    return BoundedFolder(find_cache_folder() / "features", gigabytes)
