"""perennial pause, resume and stop: of a run on this machine, by its folder."""

from pathlib import Path
from typing import Annotated

import typer

from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import is_alive
from perennial.server.control import ALIVE, clear_request, read_request, write_request

Run = Annotated[Path, typer.Argument(help="run folder")]


def pause_run(run: Run) -> None:
    """Pause a run after its current round, until `perennial resume`."""
    if not _runs(run) or read_request(run) == "pause":
        return typer.echo(_unchanged(run))
    write_request(run, "pause")
    typer.echo(f"{run}: pauses after the round that it is in")


def resume_run(run: Run) -> None:
    """Let a paused run go on."""
    if not _runs(run) or read_request(run) != "pause":
        return typer.echo(_unchanged(run))
    clear_request(run)
    typer.echo(f"{run}: goes on")


def stop_run(run: Run) -> None:
    """Stop a run; every finished round is kept, and `perennial run --resume` goes on."""
    if not _runs(run) or read_request(run) == "stop":
        return typer.echo(_unchanged(run))
    write_request(run, "stop")
    typer.echo(f"{run}: stops; `perennial run --resume {run}` goes on with it")


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
