"""The app that travels, and which ones may run at a site: those that its hospital approved.

An app is one experiment and no code, as one Flower App Bundle with one hash; server and sites run the
Perennial that they installed. A site reads it once: what is shown, what is recorded and whose hash is
compared are the same bytes. Each approval leaves a record with the full SHA-256 of the bundle and the
document of the experiment (config/approval.py), in a folder that is read-only for the SuperNode. A site
compares what arrives with the records, unpacks nothing (pinned_app.py), and takes its experiment from them.
The apps folder is read-only too, but that alone keeps no app from naming another folder. (Flower's own
trusted entities only know apps that were signed through Flower's hub.)
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import perennial
from perennial.config.approval import Approval, read_approvals
from perennial.config.document import DOCUMENT, compute_document_digest, read_document
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import SiteConfig
from perennial.config.yaml_file import LARGEST_FILE, parse_yaml
from perennial.foundation.errors import ConfigError, StateError, clean_text
from perennial.foundation.files import replace_file
from perennial.foundation.names import RUN_NAME_RULE, is_run_name

PUBLISHER, NAME, VERSION = "perennial", "perennial", perennial.__version__
PROJECT = "pyproject.toml"
MANIFEST = ".info/CONTENT"
LARGEST = 2 * 2**20
"""Bytes of an app."""
TEMPLATE = Path(__file__).with_name("app.toml")
"""Of an app's pyproject.toml, without its settings."""
MEMBERS = {PROJECT: 2**14, DOCUMENT: LARGEST_FILE, MANIFEST: 2**14}
"""Everything that an app may hold, and the most bytes of it."""
DATE = (2024, 10, 1, 0, 0, 0)
"""What Flower gives every member, so that the same app has the same hash."""
_LOCAL = struct.Struct("<4s5H3L2H")
_log = logging.getLogger("perennial.deploy")
_VERSION = re.compile(rb'^version = "([0-9]+(\.[0-9a-z]+){1,4})"$', re.MULTILINE)


@dataclass(frozen=True)
class Application:
    """An app that is ready to be sent.

    folder: what `flwr run` takes. fab: the Flower App Bundle (FAB). digest: the FAB's SHA-256.
    """

    folder: Path
    fab: Path
    digest: str


def stage_application(experiment: Path, overrides: list[str], name: str, apps: Path) -> Application:
    """Put the experiment, resolved, below apps/name, and build its bundle.

    The same experiment gives the same bytes, so the same hash, whatever the run is called. Raises ConfigError
    for a bad experiment or name; StateError when apps/name holds another app already.
    """
    resolved = load_experiment(experiment, overrides)
    name = name or resolved.name
    if resolved.strategy.trains and not resolved.bounds.in_words and resolved.secure is None:
        _log.warning(
            "%s: no `bounds`, so nothing limits how far one site moves the model; "
            "`bounds: {norm_multiple: 3}` does, here and in `perennial run`",
            experiment,
        )
    document = resolved.to_yaml()
    project = project_file(VERSION, compute_document_digest(parse_yaml(document, str(experiment))))
    members = {DOCUMENT: document.encode(), PROJECT: project.encode()}
    content, folder = build_archive(members), _locate_app(name, apps)
    if not folder.exists():
        staged = apps / f".{name}.staged"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        for member, data in members.items():
            replace_file(staged / member, data, mode=0o644)
        staged.rename(folder)
    elif pack_archive(folder) != content:
        raise StateError(
            f"{folder}: holds another experiment, or is of another version; choose another --name"
        )
    staged_app = read_application(name, apps)
    replace_file(staged_app.fab, content, mode=0o644)
    return staged_app


def read_application(name: str, apps: Path) -> Application:
    """A staged app as it was submitted. Raises StateError, which names the submitted ones, without it."""
    folder = _locate_app(name, apps)
    if not (folder / PROJECT).is_file():
        known = ", ".join(sorted(path.parent.name for path in apps.glob(f"*/{PROJECT}"))) or "none yet"
        raise StateError(f"run {name!r}: no experiment of this name was submitted; submitted: {known}")
    digest = hashlib.sha256(pack_archive(folder)).hexdigest()
    # as Flower names the file of an app of this version
    fab = f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab"
    return Application(folder, apps / fab, digest)


def _locate_app(name: str, apps: Path) -> Path:
    """The folder of a run's app. Raises ConfigError unless a run may have this name."""
    if not is_run_name(name):
        raise ConfigError(f"run name: found {name!r:.80}, allowed {RUN_NAME_RULE}")
    return apps / name


def build_archive(members: Mapping[str, bytes]) -> bytes:
    """The Flower App Bundle of these members, byte for byte as `flwr build` writes it."""
    buffer, lines = io.BytesIO(), list[str]()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(members, key=lambda name: (name != PROJECT, name)):
            archive.writestr(zipfile.ZipInfo(name, DATE), members[name])
            lines.append(f"{name},{hashlib.sha256(members[name]).hexdigest()},{len(members[name]) * 8}")
        archive.writestr(zipfile.ZipInfo(MANIFEST, DATE), "\n".join(lines))
    return buffer.getvalue()


def read_archive(data: bytes, where: str) -> dict[str, bytes]:
    """Members of an app by name, without its manifest; nothing but these bytes can be in it.

    What is read is built again, and is refused where that gives other bytes: other software may read such an
    archive in another way than this one. data: the archive, named `where` in errors. Raises ConfigError.
    """
    if len(data) > LARGEST:
        raise ConfigError(f"{where}: found {len(data)} bytes, allowed {LARGEST}")
    found: dict[str, bytes] = {}
    place = 0
    while data[place : place + 4] == b"PK\x03\x04" and place + _LOCAL.size <= len(data):
        header = _LOCAL.unpack_from(data, place)
        size, start = header[8], place + _LOCAL.size + header[9]
        name = data[place + _LOCAL.size : start].decode("ascii", "replace")
        if name not in MEMBERS:
            raise ConfigError(
                f"{where}: member {clean_text(repr(name))}: an app carries an experiment and no code; "
                f"allowed: {', '.join(MEMBERS)}"
            )
        if size > MEMBERS[name] or name in found:
            raise ConfigError(
                f"{where}: member {name!r}: found {size} bytes, allowed {MEMBERS[name]}, and each member once"
            )
        found[name] = data[start : start + size]
        place = start + size
    members = {name: content for name, content in found.items() if name != MANIFEST}
    if not members or build_archive(members) != data:
        raise ConfigError(
            f"{where}: not an app bundle as `perennial deploy stage` writes it: its list of members, a "
            "checksum, their order, or bytes that belong to no member"
        )
    return members


def pack_archive(folder: Path) -> bytes:
    """The bundle of a staged app."""
    return build_archive(
        {name: (folder / name).read_bytes() for name in MEMBERS if (folder / name).is_file()}
    )


def read_at_most(path: Path, size: int) -> bytes:
    """The file's bytes, or one more than `size`. Raises ConfigError when it cannot be read."""
    try:
        # a pipe would be waited for
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(size + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_version(project: bytes) -> str:
    """The version in an app's pyproject.toml; this release's where it names none."""
    found = _VERSION.search(project)
    return VERSION if found is None else found[1].decode()


def project_file(version: str, digest: str) -> str:
    """The pyproject.toml of an app, byte for byte: what Flower makes of it is the same again.

    digest: of the experiment. Its dependencies are in the installations: nothing is installed at run time.
    """
    settings = {**RunSettings().__dict__, "experiment": DOCUMENT, "digest": digest}
    texts_first = sorted(settings.items(), key=lambda item: isinstance(item[1], int))
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in texts_first)
    return TEMPLATE.read_text(encoding="utf-8").replace("@{version}", version) + lines


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
    data = read_at_most(fab, LARGEST)
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
    expected = project_file(read_version(members[PROJECT]), experiment.digest)
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
    with _make_writable(flower_home / "apps"), _make_writable(approvals):
        pass


def approve(offer: Offer, flower_home: Path, approvals: Path) -> Approval:
    """Unpack an app into the apps folder, and record its experiment in the folder approvals.

    Raises ConfigError when it shares the folder's name with another app.
    """
    for approval in read_approvals(approvals):
        # Flower names an app's folder after 8 digits of its hash, and would run the one that is there
        if approval.bundle[:8] == offer.digest[:8] and approval.bundle != offer.digest:
            raise ConfigError(
                f"app {approval.app!r}: approved here with SHA-256 {approval.bundle}, and this one, "
                f"{offer.digest}, would have the same folder; disapprove that one first, and ask the "
                "operator why"
            )
    approval = Approval(
        app=f"{PUBLISHER}.{NAME}.{read_version(offer.members[PROJECT])}.{offer.digest[:8]}",
        bundle=offer.digest,
        experiment=offer.experiment.digest,
        document=offer.document,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with _make_writable(flower_home / "apps") as apps:
        # an approval that was killed may have left half of it
        for folder in apps.glob(f"*.{offer.digest[:8]}"):
            shutil.rmtree(folder)
        (apps / approval.app).mkdir()
        for name, content in offer.members.items():
            replace_file(apps / approval.app / name, content, mode=0o444)
    with _make_writable(approvals):
        replace_file(approvals / approval.name, approval.model_dump_json(indent=1).encode(), mode=0o444)
    return approval


def withdraw_approval(name: str, flower_home: Path, approvals: Path) -> None:
    """Take an approval back. Raises ConfigError naming the approved apps."""
    approved = [approval.app for approval in list_approved_apps(approvals)]
    if name not in approved:
        raise ConfigError(f"app {name!r}: not approved here; approved: {', '.join(approved) or 'none'}")
    # the records first: without one, an app that is still unpacked does not run
    with _make_writable(approvals):
        for approval in read_approvals(approvals):
            if approval.app == name:
                (approvals / approval.name).unlink()
                shutil.rmtree(approvals / approval.name.removesuffix(".json"), ignore_errors=True)
    with _make_writable(flower_home / "apps") as apps:
        shutil.rmtree(apps / name, ignore_errors=True)


def list_approved_apps(approvals: Path) -> list[Approval]:
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
                f"{folder}: {user} can write here, so the process that serves the operator could change what "
                "is approved. Run the SuperNode as another user than root with this folder read-only, as the "
                "compose file and the systemd unit do"
            )


@contextmanager
def _make_writable(folder: Path) -> Iterator[Path]:
    """What is in a folder can be changed inside, and by nobody but root afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.chmod(path, 0o755)
    try:
        yield folder
    finally:
        for path in (*folder.rglob("*"), folder):
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
