"""The app that travels: one experiment and no code, as one Flower App Bundle with one hash.

Server and sites run the Perennial that they installed. A site approves the hash, and with it the experiment
(see deploy/approval.py).
"""

import hashlib
import io
import logging
import re
import shutil
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import perennial
from perennial.config.document import DOCUMENT, document_digest
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.yaml_file import LARGEST_FILE, parse_yaml
from perennial.foundation.errors import ConfigError, StateError, shown
from perennial.foundation.files import replace_file

PUBLISHER, NAME, VERSION = "perennial", "perennial", perennial.__version__
PROJECT = "pyproject.toml"
MANIFEST = ".info/CONTENT"
LARGEST = 2 * 2**20
"""Bytes of an app."""
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

    folder: what `flwr run` takes.
    fab: the Flower App Bundle (FAB), named as Flower names it.
    digest: the FAB's SHA-256.
    """

    folder: Path
    fab: Path
    digest: str


def stage_application(experiment: Path, overrides: list[str], name: str, apps: Path) -> Application:
    """Put the experiment, resolved, below apps/name, and build its bundle.

    The same experiment gives the same bytes, so the same hash, whatever the run is called. Raises ConfigError
    for a bad experiment; StateError when apps/name holds another app already.
    """
    resolved = load_experiment(experiment, overrides)
    name = name or resolved.name
    staged, folder = apps / f".{name}.staged", apps / name
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    if resolved.strategy.trains and not resolved.bounds.in_words and resolved.secure is None:
        _log.warning(
            "%s: no `bounds`, so nothing limits how far one site moves the model; "
            "`bounds: {norm_multiple: 3}` does, here and in `perennial run`",
            experiment,
        )
    document = resolved.to_yaml()
    digest = document_digest(parse_yaml(document, str(experiment)))
    replace_file(staged / DOCUMENT, document.encode(), mode=0o644)
    project = project_file(VERSION, digest)
    replace_file(staged / PROJECT, project.encode(), mode=0o644)
    content = archive_of(staged)
    digest = hashlib.sha256(content).hexdigest()
    if folder.exists():
        if archive_of(folder) != content:
            shutil.rmtree(staged)
            raise StateError(
                f"{folder}: holds another experiment, or is of another version; choose another --name"
            )
        shutil.rmtree(staged)
    else:
        staged.rename(folder)
    fab = apps / _fab(digest)
    replace_file(fab, content, mode=0o644)
    return Application(folder, fab, digest)


def read_application(name: str, apps: Path) -> Application:
    """A staged app as it was submitted. Raises StateError, which names the submitted ones, without it."""
    folder = apps / name
    if not (folder / PROJECT).is_file():
        known = ", ".join(sorted(path.parent.name for path in apps.glob(f"*/{PROJECT}"))) or "none yet"
        raise StateError(f"run {name!r}: no experiment of this name was submitted; submitted: {known}")
    digest = hashlib.sha256(archive_of(folder)).hexdigest()
    return Application(folder, apps / _fab(digest), digest)


def app_name(version: str, digest: str) -> str:
    """What Flower calls the folder that an app is unpacked to."""
    return f"{PUBLISHER}.{NAME}.{version}.{digest[:8]}"


def _fab(digest: str) -> str:
    """What Flower calls the file of an app of this version."""
    return f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab"


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
                f"{where}: member {shown(repr(name))}: an app carries an experiment and no code; "
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


def archive_of(folder: Path) -> bytes:
    """The bundle of a staged app."""
    return build_archive(
        {name: (folder / name).read_bytes() for name in MEMBERS if (folder / name).is_file()}
    )


def version_of(project: bytes) -> str:
    """The version in an app's pyproject.toml; this release's where it names none."""
    found = _VERSION.search(project)
    return VERSION if found is None else found[1].decode()


def project_file(version: str, digest: str) -> str:
    """The pyproject.toml of an app, byte for byte: what Flower makes of it is the same again.

    digest: of the experiment. Its dependencies are in the installations: nothing is installed at run time.
    """
    settings = {**RunSettings().__dict__, "experiment": DOCUMENT, "digest": digest}
    lines = [f'{key} = "{value}"' for key, value in settings.items() if isinstance(value, str)]
    lines += [f"{key} = {value}" for key, value in settings.items() if isinstance(value, int)]
    return (
        f'[project]\nname = "{NAME}"\nversion = "{version}"\n'
        'description = "Federated class-incremental learning"\nlicense = "Apache-2.0"\ndependencies = []\n\n'
        f'[tool.flwr.app]\npublisher = "{PUBLISHER}"\n'
        "fab-include = [\n" + "".join(f'    "{member}",\n' for member in (DOCUMENT, PROJECT)) + "]\n\n"
        '[tool.flwr.app.components]\nserverapp = "perennial.server.app:app"\n'
        'clientapp = "perennial.client.app:app"\n\n'
        "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n"
    )
