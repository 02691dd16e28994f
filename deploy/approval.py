"""Which apps may run at a site: those whose code is in the site's own apps folder.

A SuperNode runs an app from the folder that is named after the app's hash, and unpacks what arrived only
when that folder is missing. At a site the apps folder is read-only for the SuperNode, so code that arrives is
never run: an approved app runs from the copy that was reviewed, and any other cannot be unpacked and is
refused.
The folder is named after 8 digits of the hash only, so each approval leaves a record with the full SHA-256 of
bundle, code and resolved experiment (config/approval.py), which every message's process compares with what it
runs. Records lie in a folder of their own, read-only too.
(Flower's own trusted entities only know apps that were signed through Flower's hub.)
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perennial.config.approval import Approval, code_sha256, read_approvals
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import APP_ROOT
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file

EXPERIMENTS = "perennial/experiments/"
"""Where an app holds its experiments, and an encoder's file beside them."""
LARGEST = 64 * 2**20
"""Bytes of an app's experiments, unpacked."""


@dataclass(frozen=True)
class ApprovedApp:
    """One app that may run. name: publisher.app.version.first-8-of-hash."""

    name: str
    experiments: tuple[str, ...]


def read_hash(fab: Path) -> str:
    """SHA-256 of an app bundle, to compare with the operator's. Raises ConfigError when it cannot be read."""
    try:
        return hashlib.sha256(fab.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{fab}: cannot be read: {error.strerror}") from error


def prepare_apps(flower_home: Path, approvals: Path) -> None:
    """An apps folder in which nothing is approved, and an empty folder of records."""
    (flower_home / "apps").mkdir(parents=True, exist_ok=True)
    _freeze(flower_home / "apps")
    with _writable(approvals):
        pass


def offered_experiments(fab: Path) -> dict[str, Experiment]:
    """The experiments inside a FAB, resolved, by their file inside the app; nothing is run or kept.

    Raises ConfigError when the file is no FAB or an experiment is not valid.
    """
    try:
        with zipfile.ZipFile(fab) as archive, tempfile.TemporaryDirectory() as folder:
            inside = [item for item in archive.infolist() if item.filename.startswith(EXPERIMENTS)]
            if sum(item.file_size for item in inside) > LARGEST:
                raise ConfigError(f"{fab}: experiments of more than {LARGEST} bytes")
            for item in inside:
                if not item.is_dir():
                    # by name alone: a member's path decides nothing about where it is written
                    Path(folder, Path(item.filename).name).write_bytes(archive.read(item))
            files = sorted(Path(folder).glob("*.yaml"))
            return {f"experiments/{path.name}": load_experiment(path) for path in files}
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{fab}: not an app bundle: {error}") from error


def approve(fab: Path, flower_home: Path, expected: str, approvals: Path) -> ApprovedApp:
    """Unpack an app bundle into the apps folder, and record code and experiments in the folder approvals.

    expected: the bundle's SHA-256, as the operator told it otherwise. Raises ConfigError when the file is not
    an app bundle, has another hash, or shares the folder's name with another app.
    """
    import click

    from perennial.deploy.flower_seam import install_from_fab

    found = read_hash(fab)
    if len(expected) != 64 or found != expected.lower():
        raise ConfigError(f"{fab}: SHA-256 is {found}, allowed {expected}; ask the operator which is right")
    _refuse_same_folder(found, approvals)
    apps = flower_home / "apps"
    apps.mkdir(parents=True, exist_ok=True)
    os.chmod(apps, 0o755)
    try:
        installed = install_from_fab(fab.read_bytes(), install_dir=flower_home, skip_prompt=True)
    except (click.ClickException, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{fab}: not an app bundle: {error}") from error
    finally:
        _freeze(apps)
    _record(installed, found, approvals)
    return _describe(installed)


def approve_installed(experiment: Path, approvals: Path) -> Approval:
    """Record an experiment for the code that is installed here, which a site runs without a SuperNode."""
    resolved = load_experiment(experiment)
    approval = Approval(
        app="",
        bundle="",
        code=code_sha256(APP_ROOT),
        file=str(experiment),
        experiment=resolved.digest,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=resolved.model_dump(mode="json"),
    )
    _write(approval, approvals)
    return approval


def disapprove(name: str, flower_home: Path, approvals: Path) -> None:
    """Take an approval back. Raises ConfigError naming the approved apps."""
    approved = {app.name: app for app in approved_apps(flower_home)}
    if name not in approved:
        raise ConfigError(f"app {name!r}: not approved here; approved: {', '.join(approved) or 'none'}")
    apps = flower_home / "apps"
    for folder in (apps, apps / name, *(path for path in (apps / name).rglob("*") if path.is_dir())):
        os.chmod(folder, 0o755)
    shutil.rmtree(apps / name)
    _freeze(apps)
    with _writable(approvals):
        for approval in read_approvals(approvals):
            if approval.app == name:
                (approvals / approval.name).unlink()


def approved_apps(flower_home: Path) -> list[ApprovedApp]:
    """Every app that may run here."""
    return [_describe(path) for path in sorted((flower_home / "apps").glob("*")) if path.is_dir()]


def require_read_only(flower_home: Path, approvals: Path) -> None:
    """Check that the SuperNode's user can add neither an app nor an approval.

    Raises StateError otherwise, because nothing would be pinned.
    """
    apps = flower_home / "apps"
    for folder in (apps, approvals):
        if not folder.is_dir():
            raise StateError(f"{folder}: no app is approved yet; approve one with `perennial site approve`")
        if os.access(folder, os.W_OK):
            user = "root" if os.getuid() == 0 else f"user {os.getuid()}"
            raise StateError(
                f"{folder}: {user} can write here, so an app that arrives could be unpacked and run. Run the "
                "SuperNode as another user than root with this folder read-only, as the compose file and the "
                "systemd unit do, or set connection.any_app: true in site.yaml to run whatever the operator "
                "sends, which nothing in that file binds"
            )


def _freeze(apps: Path) -> None:
    """Nobody but root can add to the apps folder or change what is in it."""
    for path in (*apps.rglob("*"), apps):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)


def _refuse_same_folder(bundle: str, approvals: Path) -> None:
    """Flower names an app's folder after 8 digits of its hash, and would run the one that is there."""
    for approval in read_approvals(approvals):
        if approval.bundle[:8] == bundle[:8] and approval.bundle != bundle:
            raise ConfigError(
                f"app {approval.app!r}: approved here with SHA-256 {approval.bundle}, and this one, "
                f"{bundle}, would have the same folder; disapprove that one first, and ask the operator why"
            )


def _record(installed: Path, bundle: str, approvals: Path) -> None:
    """Write a record for each experiment of an unpacked app."""
    package = installed / "perennial"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for path in sorted((package / "experiments").glob("*.yaml")):
        resolved = load_experiment(path)
        approval = Approval(
            app=installed.name,
            bundle=bundle,
            code=code_sha256(package),
            file=path.relative_to(package).as_posix(),
            experiment=resolved.digest,
            time=now,
            settings=resolved.model_dump(mode="json"),
        )
        _write(approval, approvals)


def _write(approval: Approval, approvals: Path) -> None:
    with _writable(approvals):
        data = approval.model_dump_json(indent=1).encode()
        replace_file(approvals / approval.name, data, mode=0o444)


@contextmanager
def _writable(approvals: Path) -> Iterator[None]:
    """Records can be written inside, and by nobody but root afterwards."""
    approvals.mkdir(parents=True, exist_ok=True)
    os.chmod(approvals, 0o755)
    try:
        yield
    finally:
        os.chmod(approvals, 0o555)


def _describe(folder: Path) -> ApprovedApp:
    names = sorted(path.stem for path in (folder / "perennial" / "experiments").glob("*.yaml"))
    return ApprovedApp(folder.name, tuple(names))
