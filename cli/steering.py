"""perennial pause, resume and stop: of a run on this machine, by its folder."""

from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import is_alive
from perennial.server.control import ALIVE, clear_request, read_request, write_request


def pause_run(run: Path) -> str:
    """Let a run rest after the round that it is in; what is now, in words."""
    if not _runs(run) or read_request(run) == "pause":
        return _unchanged(run)
    write_request(run, "pause")
    return f"{run}: pauses after the round that it is in"


def resume_run(run: Path) -> str:
    """End the pause of a run; what is now, in words."""
    if not _runs(run) or read_request(run) != "pause":
        return _unchanged(run)
    clear_request(run)
    return f"{run}: goes on"


def stop_run(run: Path) -> str:
    """End a run at once; what is now, in words."""
    if not _runs(run) or read_request(run) == "stop":
        return _unchanged(run)
    write_request(run, "stop")
    return f"{run}: stops; `perennial run --resume {run}` goes on with it"


def _runs(run: Path) -> bool:
    """Raises StateError where there is no run."""
    if not run.is_dir():
        raise StateError(f"{run}: no such run")
    return is_alive(run / ALIVE)


def _unchanged(run: Path) -> str:
    match _runs(run), read_request(run):
        case True, "pause":
            return f"{run}: paused; `perennial resume {run}` lets it go on"
        case True, "stop":
            return f"{run}: stops already"
        case True, _:
            return f"{run}: runs; nothing was changed"
    if (run / "summary.json").exists():
        return f"{run}: finished; nothing was changed"
    return f"{run}: does not run; `perennial run --resume {run}` goes on with it"
