"""Which apps may run at a site: those whose code is in the site's own apps folder.

A SuperNode runs an app from the folder that is named after the app's hash, and unpacks what arrived only
when that folder is missing. At a site the apps folder is read-only for the SuperNode, so code that arrives is
never run: an approved app runs from the copy that was reviewed, and any other cannot be unpacked and is
refused.
(Flower's own trusted entities only know apps that were signed through Flower's hub.)
"""

import hashlib
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from perennial.foundation.errors import ConfigError, StateError


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


def prepare_apps(flower_home: Path) -> None:
    """An apps folder in which nothing is approved."""
    (flower_home / "apps").mkdir(parents=True, exist_ok=True)
    _freeze(flower_home / "apps")


def approve(fab: Path, flower_home: Path, expected: str) -> ApprovedApp:
    """Unpack an app bundle into the apps folder. expected: its SHA-256, as the operator told it otherwise.

    Raises ConfigError when the file is not an app bundle or has another hash.
    """
    import click

    from perennial.deploy.flower_seam import install_from_fab

    found = read_hash(fab)
    if len(expected) != 64 or found != expected.lower():
        raise ConfigError(f"{fab}: SHA-256 is {found}, allowed {expected}; ask the operator which is right")
    apps = flower_home / "apps"
    apps.mkdir(parents=True, exist_ok=True)
    os.chmod(apps, 0o755)
    try:
        installed = install_from_fab(fab.read_bytes(), install_dir=flower_home, skip_prompt=True)
    except (click.ClickException, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{fab}: not an app bundle: {error}") from error
    finally:
        _freeze(apps)
    return _describe(installed)


def withdraw(name: str, flower_home: Path) -> None:
    """Take an approval back. Raises ConfigError naming the approved apps."""
    approved = {app.name: app for app in approved_apps(flower_home)}
    if name not in approved:
        raise ConfigError(f"app {name!r}: not approved here; approved: {', '.join(approved) or 'none'}")
    apps = flower_home / "apps"
    for folder in (apps, apps / name, *(path for path in (apps / name).rglob("*") if path.is_dir())):
        os.chmod(folder, 0o755)
    shutil.rmtree(apps / name)
    _freeze(apps)


def approved_apps(flower_home: Path) -> list[ApprovedApp]:
    """Every app that may run here."""
    return [_describe(path) for path in sorted((flower_home / "apps").glob("*")) if path.is_dir()]


def require_read_only(flower_home: Path) -> None:
    """Raises StateError when the SuperNode's user could add an app: then nothing would be pinned."""
    apps = flower_home / "apps"
    if not apps.is_dir():
        raise StateError(f"{apps}: no app is approved yet; approve one with `perennial site approve`")
    if os.access(apps, os.W_OK):
        user = "root" if os.getuid() == 0 else f"user {os.getuid()}"
        raise StateError(
            f"{apps}: {user} can write here, so an app that arrives could be unpacked and run. Run the "
            "SuperNode as another user than root with this folder read-only, as the compose file and the "
            "systemd unit do, or set connection.any_app: true in site.yaml to run whatever the operator sends"
        )


def _freeze(apps: Path) -> None:
    """Nobody but root can add to the apps folder or change what is in it."""
    for path in (*apps.rglob("*"), apps):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)


def _describe(folder: Path) -> ApprovedApp:
    names = sorted(path.stem for path in (folder / "perennial" / "experiments").glob("*.yaml"))
    return ApprovedApp(folder.name, tuple(names))
