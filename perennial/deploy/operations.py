"""What an operator does with a running federation: register and revoke sites; submit, watch and stop runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perennial.deploy import control
from perennial.deploy.application import Application, pack_archive, read_application, stage_application
from perennial.deploy.bundle import write_bundle
from perennial.deploy.control import RunBook
from perennial.deploy.federation import OperatorFolder, SiteRecord, give_to_owner
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import lock_folder
from perennial.foundation.plugins import use_also
from perennial.server.control import (
    CONTROL,
    clear_request,
    parse_split_key,
    pin_split_key,
    read_request,
    write_request,
)


def add_site(folder: OperatorFolder, name: str, public_key: Path | None) -> Iterator[str]:
    """Add a site, register it with Flower and write its bundle; yields what was done, in words.

    public_key: the site's .pub file; None where it is on record. Raises ConfigError for a bad key, StateError
    where the site is registered with another one, or the SuperLink does not answer: said again, it goes on.
    """
    given = None
    if public_key is not None:
        try:
            given = public_key.read_bytes()
        except OSError as error:
            raise ConfigError(f"{public_key}: cannot be read: {error.strerror}") from error
    with lock_folder(folder.apps):
        if given is not None:
            yield f"{name}: key {folder.add_site(name, given)}"
        record = folder.site(name)
        if record.state == "revoked":
            raise StateError(f"site {name!r}: revoked; it needs a new key")
        if record.state == "added":
            node = control.register_node(folder, name)
            folder.write_site(name, SiteRecord(state="registered", node=node))
            yield f"{name}: registered as node {node}"
        folder.write_names()
        bundle = write_bundle(folder, name)
    yield f"{bundle}\n{bundle.with_name(f'{bundle.name}.sha256').read_text(encoding='utf-8').split()[0]}"


def revoke(folder: OperatorFolder, name: str) -> None:
    """Shut a site out, from its next message on. Its key cannot be registered again: it needs a new one.

    Said again, it goes on. Raises StateError for a site that was never registered, and where Flower does not
    answer, after the gateway has shut the site out.
    """
    with lock_folder(folder.apps):
        record = folder.site(name)
        if record.state == "added":
            raise StateError(f"site {name!r}: not registered")
        # the gateway reads this record, so that it holds whatever becomes of Flower's answer
        folder.write_site(name, record.model_copy(update={"state": "revoked"}))
        folder.write_names()
        try:
            control.unregister_node(folder, record.node)
        except StateError as lost:
            raise StateError(
                f"{lost}\nsite {name!r}: is shut out, and Flower still knows its key; the same command again "
                "takes it from there too"
            ) from lost


COMPLETED = "finished:completed"


@dataclass(frozen=True)
class Standing:
    """The state of a submitted run. going: Flower's ids of starts that are not over, oldest first."""

    name: str
    going: tuple[str, ...]
    status: str
    """Flower's, of the start that counts; '' before the first."""
    paused: bool
    begun_again: bool
    """Whether it had finished, and asks its sites again when it is resumed."""

    @classmethod
    def of(cls, folder: OperatorFolder, name: str) -> "Standing":
        runs, book = control.list_runs(folder), RunBook(folder.apps)
        started = book.find_owners(runs).get(name, [])
        if started != book.list_recorded(name):  # one is adopted
            book.note(name, *started)
        going = tuple(run for run in started if run in runs and not runs[run].over)
        counts = (going or tuple(started))[-1:]
        status = (runs[counts[0]].status if counts[0] in runs else "unknown") if counts else ""
        run, again = folder.state / "runs" / name, False
        if status == COMPLETED and not going:
            from perennial.server.checkpoint import is_begun_again

            again = is_begun_again(run)
        return cls(name, going, status, read_request(run) == "pause", again)

    @property
    def finished(self) -> bool:
        return not self.going and self.status == COMPLETED and not self.begun_again

    def describe_unchanged(self) -> str:
        """The result of a command that changed nothing: the run's state, and which command would go on."""
        name = self.name
        if self.going:
            flower = f"Flower's run {self.going[-1]}"
            if self.paused:
                return f"{name}: paused ({flower}); `perennial deploy resume {name}` lets it go on"
            return f"{name}: {self.status} ({flower}); nothing was changed"
        if self.finished:
            return f"{name}: finished; to run the experiment once more, submit it under another --name"
        if self.begun_again:
            return f"{name}: without a site that withdrew; `perennial deploy resume {name}` goes on"
        if not self.status:
            return f"{name}: staged, and not started yet; start it with `perennial deploy submit`"
        return f"{name}: ended early ({self.status}); `perennial deploy resume {name}` goes on with it"


def submit(
    folder: OperatorFolder,
    experiment: Path,
    overrides: list[str],
    name: str,
    device: str,
    split_key: str = "",
) -> str:
    """Stage an experiment and start its run, unless a run of this name was started before; returns its state.

    device: of the server, as in RunSettings. split_key: pins the key by which sites split their data.
    Raises ConfigError for a bad name or key, StateError when the name is that of another experiment.
    """
    if split_key:
        split_key = parse_split_key(split_key, "--split-key")
    with lock_folder(folder.apps):
        application = stage(folder, experiment, overrides, name)
        standing = Standing.of(folder, application.folder.name)
        if standing.status:
            return standing.describe_unchanged()
        # also where it names none: an earlier one may have pinned a key, and not reached the SuperLink
        pin_split_key(folder.state / "runs" / standing.name, split_key)
        if split_key:
            give_to_owner(folder.path, folder.state / "runs" / CONTROL)
        return _start(folder, application, {"device": device})


def stage(folder: OperatorFolder, experiment: Path, overrides: list[str], name: str) -> Application:
    """Stage an experiment for sites to approve without running it."""
    with use_also(folder.list_plugins(folder.path)):
        return stage_application(experiment, overrides, name, folder.apps)


def pause(folder: OperatorFolder, name: str) -> str:
    """Pause a run after its current round, until it is resumed; nothing if it does not run."""
    with _open_standing(folder, name) as standing:
        if standing.paused or not standing.going:
            return standing.describe_unchanged()
        write_request(folder.state / "runs" / name, "pause")
        return f"{name}: pauses after the round that it is in"


def resume(folder: OperatorFolder, name: str, device: str) -> str:
    """Resume a run that was paused or ended early, with the same app, and so the same approvals.

    Changes nothing if it runs, is finished, or was never started.
    """
    with _open_standing(folder, name) as standing:
        if standing.finished or not standing.status or (standing.going and not standing.paused):
            return standing.describe_unchanged()
        clear_request(folder.state / "runs" / name)
        if standing.going:
            return f"{name}: goes on"
        application = read_application(name, folder.apps)
        return _start(folder, application, {"device": device, "resume": "yes"})


def stop(folder: OperatorFolder, name: str) -> str:
    """Stop a run, which keeps its finished rounds and can be resumed; nothing if it does not run.

    name: of the run; or Flower's id of one that is unknown here.
    """
    if name.isdecimal() and name in RunBook(folder.apps).find_unknown(control.list_runs(folder)):
        control.stop_run(folder, name)
        return f"Flower's run {name}: stopped; no folder here names it"
    with _open_standing(folder, name) as standing:
        if not standing.going:
            return standing.describe_unchanged()
        for run in standing.going:
            control.stop_run(folder, run)
        RunBook(folder.apps).note(name)
        return f"{name}: stopped; `perennial deploy resume {name}` goes on with it"


@contextmanager
def _open_standing(folder: OperatorFolder, name: str) -> Iterator[Standing]:
    """While nobody else changes runs. Raises StateError where no experiment of this name was submitted."""
    with lock_folder(folder.apps):
        read_application(name, folder.apps)
        yield Standing.of(folder, name)


def last_run(folder: OperatorFolder, name: str, *, logs: bool = False) -> str:
    """Flower's id of the latest start of a run; with `logs`, of one whose ServerApp has begun.

    Raises StateError when there is none.
    """
    read_application(name, folder.apps)
    runs = control.list_runs(folder)
    started = RunBook(folder.apps).find_owners(runs).get(name, [])
    if not started:
        raise StateError(f"run {name!r}: staged, but never started; start it with `perennial deploy submit`")
    run = started[-1]
    if logs and run in runs and runs[run].status in ("pending", "starting"):
        raise StateError(
            f"run {name!r}: {runs[run].status} (Flower's run {run}); its ServerApp has not started, so it "
            "has said nothing yet. If this lasts more than a minute, look at the SuperLink's own log: "
            "without its SuperExec it starts no app"
        )
    return run


def _start(folder: OperatorFolder, application: Application, settings: dict[str, str]) -> str:
    name = application.folder.name
    folder.write_names()
    settings = {**settings, "name": name, "runs": str(folder.root / "state" / "runs")}
    if named := folder.list_plugins(folder.root):
        settings["plugins"] = ",".join(named)
    book = RunBook(folder.apps)
    book.note(name, bundle=application.digest)
    try:
        run = control.start_run(folder, pack_archive(application.folder), application.digest, settings)
    except StateError as lost:
        # Flower may have taken it, and its answer be lost
        try:
            standing = Standing.of(folder, name)
        except StateError:
            raise StateError(
                f"{lost}\nWhether Flower took the run is not known; `perennial deploy status` will say, and "
                "the same command again begins no second one"
            ) from lost
        if not standing.status:
            pin_split_key(folder.state / "runs" / name, "")
        if not standing.going:
            raise
        run = standing.going[-1]
    book.note(name, run)
    began = "resumed" if settings.get("resume") else "started"
    app = f"app {application.fab.name}, SHA-256 {application.digest}"
    return f"{name}: {began} as Flower's run {run}\n{app}"
