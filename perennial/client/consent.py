"""What a hospital has decided beside its policy: whether it pauses, and which runs it has withdrawn from.

Both are files in state_dir that every message's process reads before anything else. A withdrawn run stays
withdrawn: the site removes what it kept of the run and answers none of its requests. Earlier releases stay
in the ledger; only the operator can say whether they can be taken out of a model.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.foundation.files import lock_folder, make_folder, measure_size, replace_file
from perennial.foundation.plain import PlainObject

PAUSED, WITHDRAWN = "paused.json", "withdrawn.json"
HEX = set("0123456789abcdef")
TOKEN_SHOWN = (
    "`perennial ledger STATE_DIR` shows each run's token, which its folder in state/runs has as a name"
)


@dataclass(frozen=True)
class Consent:
    """What the hospital decided. paused: time of the pause, or ''. withdrawn: run -> time of withdrawal."""

    paused: str
    withdrawn: dict[str, str]


def read_consent(state_dir: Path) -> Consent:
    """The hospital's decisions. Raises StateError for a damaged file: a decision must not be forgotten."""
    paused = _read(state_dir / PAUSED)
    withdrawn = _read(state_dir / WITHDRAWN)
    return Consent(str(paused.get("since", "")), {run: str(when) for run, when in withdrawn.items()})


def require_consent(state_dir: Path, run: str) -> None:
    """Raises PolicyRefusal while the site pauses, and for a run from which it has withdrawn."""
    consent = read_consent(state_dir)
    if run and run in consent.withdrawn:
        raise PolicyRefusal(f"this site has withdrawn from this run ({consent.withdrawn[run]})")
    if consent.paused:
        raise PolicyRefusal(f"this site pauses since {consent.paused}")


def pause(state_dir: Path) -> None:
    """Refuse all requests from now on until resume(); if the site pauses already, keep the earlier time."""
    make_folder(state_dir)
    if not read_consent(state_dir).paused:
        replace_file(state_dir / PAUSED, json.dumps({"since": _format_now()}).encode())


def resume(state_dir: Path) -> None:
    """End the pause: answer requests again."""
    (state_dir / PAUSED).unlink(missing_ok=True)


def withdraw(state_dir: Path, run: str) -> int:
    """Withdraw from a run for good and remove what is kept of it; returns the bytes removed.

    Raises StateError for a run of which this site knows nothing.
    """
    folder = state_dir / "runs" / run
    if not run or not set(run) <= HEX or not folder.is_dir():
        raise StateError(f"run {run!r}: this site keeps nothing of such a run; {TOKEN_SHOWN}")
    with lock_folder(state_dir):
        said = read_consent(state_dir).withdrawn | {run: _format_now()}
        replace_file(state_dir / WITHDRAWN, json.dumps(said, indent=1).encode())
        size = measure_size(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise StateError(f"{folder}: cannot be removed ({error.strerror})") from error
    return size


@contextmanager
def exclude_withdrawal(state_dir: Path, run: str) -> Iterator[None]:
    """A block in which no withdrawal from the run is said. Raises PolicyRefusal where one was."""
    with lock_folder(state_dir):
        if run in read_consent(state_dir).withdrawn:
            raise PolicyRefusal(f"this site has withdrawn from run {run}")
        yield


def remove_withdrawn(state_dir: Path, run: str) -> None:
    """Remove what was written of a run since the site withdrew from it; nothing where it did not."""
    with lock_folder(state_dir):
        if run and run in read_consent(state_dir).withdrawn:
            shutil.rmtree(state_dir / "runs" / run, ignore_errors=True)


def _read(path: Path) -> PlainObject:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(
            f"{path}: cannot be read ({error}); nothing is answered until it is restored"
        ) from error
    if not isinstance(found, dict):
        raise StateError(f"{path}: damaged; nothing is answered until it is restored")
    return found


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
