"""Limits how much a site keeps on its disk for its runs, as the hospital says, and removes what is over."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perennial.config.site import StateLimits
from perennial.foundation.cache import GIGABYTE, BoundedFolder
from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.foundation.files import size_of

DAY = 86_400.0


@dataclass(frozen=True)
class Quota:
    """The limits on what lies in the folders of a site's runs. runs: the folder of these folders."""

    runs: Path
    limits: StateLimits

    def require(self, folder: Path, coming: int) -> None:
        """Raises PolicyRefusal naming the key when a run's folder may not take so many bytes more.

        It is asked before anything is written, so a record for which there is no room leaves no trace.
        """
        others = [path for path in _folders(self.runs) if path != folder]
        if len(others) >= self.limits.runs and not folder.exists():
            raise PolicyRefusal(
                f"state.runs: this site keeps what it knows of {self.limits.runs} runs and no more; it can "
                "remove old ones with `perennial site clean`"
            )
        own = size_of(folder) + coming
        if own > self.limits.gigabytes_per_run * GIGABYTE:
            raise PolicyRefusal(
                f"state.gigabytes_per_run: this run would need {own / GIGABYTE:.3g} GB on this site's disk, "
                f"allowed {self.limits.gigabytes_per_run:g}"
            )
        total = own + sum(size_of(path) for path in others)
        if total > self.limits.gigabytes * GIGABYTE:
            raise PolicyRefusal(
                f"state.gigabytes: all runs together would need {total / GIGABYTE:.3g} GB on this site's "
                f"disk, allowed {self.limits.gigabytes:g}; it can remove old ones with `perennial site clean`"
            )


def kept_features(state_dir: Path, limits: StateLimits) -> BoundedFolder:
    """The folder of the features of a deployed site's samples; of the maps, the longest unused goes first."""
    return BoundedFolder(state_dir / "features", limits.gigabytes / 2)


def clean(state_dir: Path, days: float) -> list[tuple[str, int]]:
    """Remove what the site keeps of runs in which nothing happened for so many days: (run, bytes) of each.

    The ledger, the count of requests and everything else of the site's life stay. Raises StateError naming
    what cannot be removed.
    """
    removed = []
    for folder in _folders(state_dir / "runs"):
        newest = max((path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
        if time.time() - newest < days * DAY:
            continue
        size = size_of(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise StateError(f"{folder}: cannot be removed ({error.strerror})") from error
        removed.append((folder.name, size))
    return removed


def _folders(runs: Path) -> Iterator[Path]:
    return (path for path in sorted(runs.glob("*")) if path.is_dir() and not path.is_symlink())
