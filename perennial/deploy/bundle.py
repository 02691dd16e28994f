"""What a hospital receives: one archive, a guide of one page, and no secret."""

import gzip
import hashlib
import io
import os
import re
import string
import tarfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from perennial.deploy.application import VERSION, prepare_apps, read_at_most
from perennial.deploy.federation import IN_CONTAINER, OperatorFolder, keep_out_of_git
from perennial.foundation.errors import ConfigError, StateError, clean_text
from perennial.foundation.files import find_user_state, make_folder, replace_file

TEMPLATES = Path(__file__).parent
SUMS = "SHA256SUMS"
"""In bundles of 0.2.0."""
AUTHORITIES = "ca.crt"
OFFERED = re.compile(r"offered/[A-Za-z0-9][A-Za-z0-9._-]*\.fab")
LARGEST = 64 * 2**20
"""Bytes; a bundle holds text and one app."""
MOST = 1_000
"""Members of a bundle."""
BLOCK = 512
"""Bytes of a header in a tar archive."""


def write_bundle(folder: OperatorFolder, name: str) -> Path:
    """Write bundles/NAME.tar.gz for a site that was added, and its SHA-256 to NAME.tar.gz.sha256."""
    folder.site(name)
    facts = {
        "name": folder.federation.name,
        "site": name,
        "project": project_name(name),
        "superlink": folder.fleet_address,
        "version": VERSION,
    }
    files = {name: template.substitute(facts).encode() for name, template in _list_templates("site").items()}
    files[AUTHORITIES] = (folder.certificates / "ca.crt").read_bytes()
    # a run may have such a name too
    for path in filter(Path.is_file, sorted(folder.apps.glob("*.fab"))):
        files[f"offered/{path.name}"] = path.read_bytes()
    data = gzip.compress(_pack_tar(name, files))
    bundle = folder.path / "bundles" / f"{name}.tar.gz"
    replace_file(bundle, data)
    digest = f"{hashlib.sha256(data).hexdigest()}  {bundle.name}\n"
    replace_file(bundle.with_name(f"{bundle.name}.sha256"), digest.encode(), mode=0o644)
    return bundle


def open_bundle(bundle: Path, folder: Path) -> list[str]:
    """Unpack a bundle into a site's folder; returns the names of the files that were written.

    What it may write is a closed list: the templates of a site, ca.crt, and apps on offer, which run only
    once they are approved. Templates that say what runs (site.yaml, .env, compose.yaml, ...) are kept when
    they are there already, so that a newer bundle brings a new ca.crt, guide or app and changes nothing that
    the hospital decided.
    Raises ConfigError, and writes nothing, for an archive that is damaged or holds paths that no bundle has.
    """
    files = _read_archive(bundle)
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    kept = _list_templates("site").keys() - {"GUIDE.md"}
    written = []
    for path, data in files.items():
        target = folder / path
        if path == SUMS or (path in kept and target.exists()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data, mode=0o644)
        written.append(path)
    keep_out_of_git(folder)
    (folder / "state").mkdir(exist_ok=True, mode=0o700)
    (folder / "tip").mkdir(exist_ok=True, mode=0o700)
    with suppress(StateError):  # compose.yaml mounts it; a user without a home sets LEDGERS
        make_folder(find_user_state())
    (folder / "data").mkdir(exist_ok=True)  # where the container mounts the data, wherever they lie
    prepare_apps(folder / "flower", folder / "approvals")
    return written


def find_offered_app(folder: Path, digest: str) -> Path:
    """The app with this SHA-256 in a site's folder offered/. Raises ConfigError, which names those there."""
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("offered/*.fab")}
    if digest.lower() not in found:
        there = ", ".join(f"{path.name} with {each}" for each, path in found.items()) or "nothing"
        raise ConfigError(f"{folder / 'offered'}: no app with SHA-256 {digest}; found {there}")
    return found[digest.lower()]


def write_operator_files(folder: OperatorFolder) -> None:
    """Write what starts the operator's processes, as deploy.yaml has it now: compose.yaml, or systemd units.

    The settings in .env are the operator's, and stay.
    """
    if folder.path == IN_CONTAINER:
        return
    facts = {
        "name": folder.federation.name,
        "project": project_name(folder.federation.name),
        "fleet_port": str(folder.federation.fleet_port),
        "version": VERSION,
        "user": str(os.getuid() or 1000),
        "group": str(os.getgid() or 1000),
    }
    units = folder.federation.runtime == "process"
    for path, template in _list_templates("operator").items():
        target, data = folder.path / path, template.substitute(facts).encode()
        if path.endswith(".service") != units or (path == ".env" and target.exists()):
            continue
        if not target.is_file() or target.read_bytes() != data:
            replace_file(target, data, mode=0o644)


def project_name(name: str) -> str:
    """name, as compose takes it for a project: a-z, 0-9, '_' and '-', so that containers get it.

    Names that compose does not take get a part of their SHA-256, so that Graz and graz stay two projects.
    """
    allowed = re.sub(r"[^a-z0-9_-]", "-", name.lower())
    return name if allowed == name else f"{allowed}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_template_policy() -> str:
    """The policy block of the template of site.yaml, with its comments, with which a hospital begins."""
    text = (TEMPLATES / "site" / "site.yaml").read_text(encoding="utf-8")
    return re.findall(r"^policy:\n(?: .*\n)+", text, re.MULTILINE)[0]


class _At(string.Template):
    """@{name}, since compose files are full of ${NAME}."""

    delimiter = "@"


def _list_templates(side: str) -> dict[str, _At]:
    """The template of each file of one side, by the file's name. That of .env is kept without its dot."""
    return {
        ".env" if path.name == "env" else path.name: _At(path.read_text(encoding="utf-8"))
        for path in sorted((TEMPLATES / side).iterdir())
    }


def _pack_tar(name: str, files: Mapping[str, bytes]) -> bytes:
    """An archive whose members lie below name/, owned by nobody in particular."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _read_archive(bundle: Path) -> dict[str, bytes]:
    """Content by path below the bundle's folder.

    What is read is packed again, so that nothing but plain files that a bundle has can be in it. Raises
    ConfigError.
    """
    packed, unpacking = read_at_most(bundle, LARGEST), zlib.decompressobj(wbits=31)
    try:
        data = unpacking.decompress(packed, LARGEST + 1)
    except zlib.error as error:
        raise ConfigError(f"{bundle}: not a readable tar.gz: {error}") from error
    if len(packed) > LARGEST or len(data) > LARGEST:
        raise ConfigError(f"{bundle}: more than {LARGEST} bytes, unpacked; this is not a bundle")
    if not unpacking.eof or unpacking.unused_data:
        raise ConfigError(f"{bundle}: not a readable tar.gz: cut, or with bytes after its end")
    named = {*_list_templates("site"), AUTHORITIES, SUMS}
    found, place, site = dict[str, bytes](), 0, ""
    while place + BLOCK <= len(data) and data[place] != 0:
        header = data[place : place + BLOCK]
        name, size = header[:100].rstrip(b"\0").decode("utf-8", "replace"), header[124:135]
        site, _, path = name.partition("/")
        if not (path in named or OFFERED.fullmatch(path)) or not size.isdigit() or len(found) == MOST:
            raise ConfigError(
                f"{bundle}: member {clean_text(repr(name))}: allowed plain files below one folder: "
                f"{', '.join(sorted(named))}, offered/NAME.fab; {MOST} at most"
            )
        length = int(size, 8) if not size.strip(b"01234567") else LARGEST
        found[path] = data[place + BLOCK : place + BLOCK + length]
        place += BLOCK + -(-length // BLOCK) * BLOCK
    if (
        not {AUTHORITIES, "site.yaml"} <= found.keys()
        or site in ("", ".", "..")
        or _pack_tar(site, found) != data
    ):
        raise ConfigError(
            f"{bundle}: not packed as `perennial deploy add-site` packs it: ca.crt or site.yaml missing, "
            "a link, two of one name, a cut member, their order, or bytes that belong to none"
        )
    return found
