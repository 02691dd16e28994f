"""Which experiments may run at a site: those that its hospital approved, by the Perennial that it installed.

An app carries an experiment and no code (deploy/application.py). It is read once: what is shown, what is
recorded and whose hash is compared are the same bytes. A SuperNode runs an app from the folder that is named
after the app's hash, and unpacks what arrived only when that folder is missing. At a site the apps folder is
read-only for the SuperNode, so that what arrives is never unpacked, and code that arrives never runs.
Each approval leaves a record with the full SHA-256 of the bundle and the document of the experiment
(config/approval.py), in a folder that is read-only too; a site takes its experiment from there.
(Flower's own trusted entities only know apps that were signed through Flower's hub.)
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perennial.config.approval import Approval, read_approvals
from perennial.config.document import DOCUMENT, read_document
from perennial.config.experiment import Experiment
from perennial.config.site import SiteConfig
from perennial.deploy.application import LARGEST, PROJECT, app_name, project_file, read_archive, version_of
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file


@dataclass(frozen=True)
class Offer:
    """An app that was read, in the bytes that were read.

    digest: SHA-256 of the file. members: content by name.
    """

    fab: Path
    digest: str
    experiment: Experiment
    document: str
    members: Mapping[str, bytes]


def read_offer(fab: Path, site: SiteConfig) -> Offer:
    """An app bundle, read once and whole; nothing of it is run, unpacked or kept.

    Raises ConfigError naming the member or key when it is not what `perennial deploy stage` makes.
    """
    data = _read(fab)
    digest = hashlib.sha256(data).hexdigest()
    where = str(fab)
    members = read_archive(data, where)
    for name in (PROJECT, DOCUMENT):
        if name not in members:
            raise ConfigError(f"{where}: has no member {name}")
    try:
        document = members[DOCUMENT].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: member {DOCUMENT}: no text in UTF-8 ({error.reason})") from error
    experiment = read_document(document, f"{where}: {DOCUMENT}", site.plugins)
    expected = project_file(version_of(members[PROJECT]), experiment.digest)
    # apps of 0.2.0 had no plug-ins of the server in their run config
    if members[PROJECT].decode("utf-8", "replace") not in (expected, expected.replace('plugins = ""\n', "")):
        raise ConfigError(
            f"{where}: member {PROJECT}: is not the one that `perennial deploy stage` writes for "
            "this experiment"
        )
    return Offer(fab, digest, experiment, document, members)


def require_hash(offer: Offer, expected: str) -> None:
    """Raises ConfigError unless an app has the SHA-256 that the operator gave through another channel."""
    if len(expected) != 64 or offer.digest != expected.lower():
        raise ConfigError(
            f"{offer.fab}: SHA-256 is {offer.digest}, allowed {expected}; ask the operator which is right"
        )


def prepare_apps(flower_home: Path, approvals: Path) -> None:
    """Make a read-only apps folder in which nothing is approved, and an empty folder of approvals."""
    (flower_home / "apps").mkdir(parents=True, exist_ok=True)
    _freeze(flower_home / "apps")
    with _writable(approvals):
        pass


def approve(offer: Offer, flower_home: Path, approvals: Path) -> Approval:
    """Unpack an app into the apps folder, and record its experiment in the folder approvals.

    Raises ConfigError when it shares the folder's name with another app.
    """
    _refuse_same_folder(offer.digest, approvals)
    approval = Approval(
        app=app_name(version_of(offer.members[PROJECT]), offer.digest),
        bundle=offer.digest,
        experiment=offer.experiment.digest,
        document=offer.document,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    apps = flower_home / "apps"
    apps.mkdir(parents=True, exist_ok=True)
    os.chmod(apps, 0o755)
    # an approval that was killed may have left half of it
    for folder in apps.glob(f"*.{offer.digest[:8]}"):
        _remove(folder)
    (apps / approval.app).mkdir()
    for name, content in offer.members.items():
        replace_file(apps / approval.app / name, content, mode=0o444)
    _freeze(apps)
    with _writable(approvals):
        replace_file(approvals / approval.name, approval.model_dump_json(indent=1).encode(), mode=0o444)
    return approval


def disapprove(name: str, flower_home: Path, approvals: Path) -> None:
    """Take an approval back. Raises ConfigError naming the approved apps."""
    approved = [approval.app for approval in approved_apps(approvals)]
    if name not in approved:
        raise ConfigError(f"app {name!r}: not approved here; approved: {', '.join(approved) or 'none'}")
    apps = flower_home / "apps"
    # the records first: without one, an app that is still unpacked does not run
    with _writable(approvals):
        for approval in read_approvals(approvals):
            if approval.app == name:
                (approvals / approval.name).unlink()
                _remove(approvals / approval.name.removesuffix(".json"))
    os.chmod(apps, 0o755)
    _remove(apps / name)
    _freeze(apps)


def approved_apps(approvals: Path) -> list[Approval]:
    """The approval of every app that may run here. Raises StateError naming a damaged record."""
    return sorted((found for found in read_approvals(approvals) if found.app), key=lambda found: found.app)


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
                "systemd unit do"
            )


def _freeze(apps: Path) -> None:
    """Nobody but root can add to the apps folder or change what is in it."""
    for path in (*apps.rglob("*"), apps):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)


def _remove(folder: Path) -> None:
    """Remove a frozen folder, if it is there."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.chmod(path, 0o755)
    shutil.rmtree(folder, ignore_errors=True)


def _refuse_same_folder(bundle: str, approvals: Path) -> None:
    """Flower names an app's folder after 8 digits of its hash, and would run the one that is there."""
    for approval in read_approvals(approvals):
        if approval.bundle[:8] == bundle[:8] and approval.bundle != bundle:
            raise ConfigError(
                f"app {approval.app!r}: approved here with SHA-256 {approval.bundle}, and this one, "
                f"{bundle}, would have the same folder; disapprove that one first, and ask the operator why"
            )


@contextmanager
def _writable(approvals: Path) -> Iterator[None]:
    """Records can be written inside, and by nobody but root afterwards."""
    approvals.mkdir(parents=True, exist_ok=True)
    os.chmod(approvals, 0o755)
    try:
        yield
    finally:
        os.chmod(approvals, 0o555)


def _read(fab: Path) -> bytes:
    """The bytes of a plain file. Raises ConfigError when it cannot be read, or is too large to be an app."""
    try:
        # a pipe would be waited for
        with os.fdopen(os.open(fab, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{fab}: not an app bundle: no plain file")
            return file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{fab}: cannot be read: {error.strerror}") from error
