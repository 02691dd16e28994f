"""Requests of people to a run in progress: to pause, or to stop.

A wish is a small file beside the run folders. The run looks for it between rounds, and for a stop also while
it waits for sites. A pause lasts until the file is removed, whatever happens to processes and machines in
between: a run that is resumed with its wish still there pauses again at once. Every round before a pause is
in a checkpoint, so a run that went on after one ends with the same bits.
"""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file

WISHES = ".wishes"
"""Folder beside the run folders: whoever may write a wish need not be able to write a run."""
LOOK = 0.5
"""Seconds between two looks at a wish."""

Wish = Literal["pause", "stop"]


class RunStopped(StateError):
    """The run ended because someone wished it; it can be resumed."""


def wish_path(run: Path) -> Path:
    """Where the wish for a run folder lies."""
    return run.parent / WISHES / f"{run.name}.json"


def read_wish(run: Path) -> Wish | None:
    """The wish for a run; None where there is none, or one that cannot be read."""
    try:
        content = json.loads(wish_path(run).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    wish = content.get("wish") if isinstance(content, dict) else None
    return cast(Wish, wish) if wish in ("pause", "stop") else None


def write_wish(run: Path, wish: Wish) -> None:
    """Wish something of a run. Raises StateError when there is no such run or it cannot be written."""
    if not run.is_dir():
        raise StateError(f"{run}: no such run")
    make_folder(wish_path(run).parent)
    content = {"wish": wish, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    # the run may be another user's than whoever wishes
    replace_file(wish_path(run), json.dumps(content).encode(), mode=0o644)


def clear_wish(run: Path) -> None:
    """Wish nothing any more. Raises StateError when the file cannot be removed."""
    try:
        wish_path(run).unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"{wish_path(run)}: cannot be removed: {error.strerror}") from error


class Wishes:
    """The wishes for one run, as the run itself obeys them.

    write: of the journal, told when the run pauses and goes on. A wish to stop that is there at the start was
    obeyed already, and is cleared.
    """

    def __init__(self, run: Path, write: Callable[..., None]) -> None:
        self._run = run
        self._write = write
        self._looked = 0.0
        if read_wish(run) == "stop":
            clear_wish(run)

    def between_rounds(self, meanwhile: Callable[[], None]) -> None:
        """Rest while a pause is wished. meanwhile: called every LOOK seconds of it. Raises RunStopped."""
        self.while_waiting(at_once=True)
        if read_wish(self._run) != "pause":
            return
        self._write("paused", reason="someone wished it")
        while read_wish(self._run) == "pause":
            meanwhile()
            time.sleep(LOOK)
        self.while_waiting(at_once=True)
        self._write("went_on")

    def while_waiting(self, *, at_once: bool = False) -> None:
        """Look for a wish to stop, not more often than every LOOK seconds. Raises RunStopped."""
        now = time.monotonic()
        if not at_once and now - self._looked < LOOK:
            return
        self._looked = now
        if read_wish(self._run) == "stop":
            clear_wish(self._run)
            self._write("stopped")
            raise RunStopped(
                f"{self._run.name}: stopped, as someone wished; every finished round is kept, and the run "
                "can be resumed"
            )
