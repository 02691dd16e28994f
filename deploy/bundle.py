"""What a hospital receives: one archive with checksums, a guide of one page, and no secret in the clear."""

import hashlib
import io
import os
import string
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from deploy.approval import prepare_apps
from deploy.federation import OperatorFolder
from deploy.keys import unseal, write_node_key
from foundation.errors import ConfigError
from foundation.files import replace_file

TEMPLATES = Path(__file__).parent
SEALED_KEY = "node.key.sealed"
SUMS = "SHA256SUMS"
LARGEST = 64 * 2**20
"""Bytes; a bundle holds text and one app."""


def write_bundle(folder: OperatorFolder, name: str) -> Path:
    """bundles/NAME.tar.gz for a site that was added; its SHA-256 stands beside it in NAME.tar.gz.sha256."""
    folder.site(name)
    files = _rendered("site", _facts(folder, name))
    files["ca.crt"] = (folder.certificates / "ca.crt").read_bytes()
    sealed = folder.path / "sites" / f"{name}.sealed"
    if sealed.exists():
        files[SEALED_KEY] = sealed.read_bytes()
    for fab in sorted(folder.apps.glob("*.fab")):
        files[f"offered/{fab.name}"] = fab.read_bytes()
    sums = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items())]
    files[SUMS] = "".join(sums).encode()
    data = _archive(name, files)
    bundle = folder.path / "bundles" / f"{name}.tar.gz"
    replace_file(bundle, data)
    digest = f"{hashlib.sha256(data).hexdigest()}  {bundle.name}\n"
    replace_file(bundle.with_name(f"{bundle.name}.sha256"), digest.encode(), mode=0o644)
    return bundle


def open_bundle(bundle: Path, folder: Path, passphrase: str | None) -> list[str]:
    """Unpack a bundle into a site's folder; what was written, by name.

    Files of the site itself (site.yaml, .env, keys) are kept when they are there already, so that a newer
    bundle brings a new ca.crt, guide or app and changes nothing that the hospital decided. passphrase: opens
    a sealed key. Raises ConfigError for an archive that is damaged, holds other paths than a bundle's, or
    whose key does not open; nothing is written then.
    """
    files = _read_archive(bundle)
    _check_sums(files, bundle)
    key = None
    if SEALED_KEY in files and not (folder / "node.key").exists():
        if passphrase is None:
            raise ConfigError(f"{bundle}: holds a sealed key; give its passphrase")
        key = unseal(files[SEALED_KEY], passphrase, f"{bundle}: {SEALED_KEY}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    kept = {"site.yaml", ".env", "compose.override.yaml"}
    written = []
    for path, data in files.items():
        target = folder / path
        if path == SEALED_KEY or (path in kept and target.exists()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data, mode=0o644)
        written.append(path)
    (folder / "state").mkdir(exist_ok=True, mode=0o700)
    (folder / "data").mkdir(exist_ok=True)  # where the container mounts the data, wherever they lie
    prepare_apps(folder / "flower")
    if key is not None:
        write_node_key(key, folder / "node.key")
        written.append("node.key")
    return written


def write_operator_files(folder: OperatorFolder) -> None:
    """Compose file and settings beside deploy.yaml."""
    user, group = os.getuid() or 1000, os.getgid() or 1000
    facts = {
        "name": folder.federation.name,
        "fleet_port": str(folder.federation.fleet_port),
        "user": str(user),
        "group": str(group),
    }
    for path, data in _rendered("operator", facts).items():
        replace_file(folder.path / path, data, mode=0o644)


def _facts(folder: OperatorFolder, name: str) -> dict[str, str]:
    return {
        "name": folder.federation.name,
        "site": name,
        "superlink": folder.fleet_address,
        "sealed": "yes" if (folder.path / "sites" / f"{name}.sealed").exists() else "no",
    }


def _rendered(kind: str, facts: Mapping[str, str]) -> dict[str, bytes]:
    """The templates of one side, by the name that each gets. A dot file is kept without its dot, as env."""
    files = {}
    for path in sorted((TEMPLATES / kind).iterdir()):
        text = path.read_text(encoding="utf-8")
        name = {"env": ".env"}.get(path.name, path.name)
        files[name] = _At(text).substitute(facts).encode()
    return files


class _At(string.Template):
    """@{name}, since compose files are full of ${NAME}."""

    delimiter = "@"


def _archive(name: str, files: Mapping[str, bytes]) -> bytes:
    """A tar.gz whose members lie below name/, owned by nobody in particular."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _read_archive(bundle: Path) -> dict[str, bytes]:
    try:
        with tarfile.open(bundle, "r:gz") as archive:
            members = archive.getmembers()
            if sum(member.size for member in members) > LARGEST:
                raise ConfigError(f"{bundle}: more than {LARGEST} bytes unpacked; this is not a bundle")
            return {_inside(member, bundle): archive.extractfile(member).read() for member in members}  # pyright: ignore[reportOptionalMemberAccess]
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ConfigError(f"{bundle}: not a readable tar.gz: {error}") from error


def _inside(member: tarfile.TarInfo, bundle: Path) -> str:
    """The path of a member below the bundle's folder. Raises ConfigError for a link or a path that leaves
    it."""
    parts = PurePosixPath(member.name).parts
    if not member.isfile() or len(parts) < 2 or ".." in parts or member.name.startswith("/"):
        raise ConfigError(f"{bundle}: member {member.name!r}: allowed plain files below one folder")
    return str(PurePosixPath(*parts[1:]))


def _check_sums(files: dict[str, bytes], bundle: Path) -> None:
    lines = files.get(SUMS, b"").decode(errors="replace").splitlines()
    listed = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    found = {path: hashlib.sha256(data).hexdigest() for path, data in files.items() if path != SUMS}
    if listed != found:
        wrong = sorted(path for path in listed.keys() | found.keys() if listed.get(path) != found.get(path))
        raise ConfigError(f"{bundle}: checksums do not fit for {', '.join(wrong)}; ask for the bundle again")
