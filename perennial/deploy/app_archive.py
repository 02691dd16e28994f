"""The members of an app bundle, read so strictly that nothing can hide in one.

A bundle is a ZIP archive as `flwr build` writes it: one member after the other from the first byte, then the
list of them, then the end. Anything else is refused before a byte of a member is looked at: other software
may read such an archive in another way than this one.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise

from perennial.foundation.errors import ConfigError, shown

LARGEST = 64 * 2**20
"""Bytes of an app, and of what it unpacks to."""
LONGEST_NAME = 200
MANIFEST = ".info/CONTENT"
_END = struct.Struct("<4s4H2LH")
_LISTED = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_UTF8 = 0x800
_FOLDER = 0x10


@dataclass(frozen=True)
class _Member:
    """A line of the list. start: of its local header. size: of its content, unpacked; packed: in the file."""

    name: str
    method: int
    checksum: int
    packed: int
    size: int
    start: int
    raw: bytes


def read_members(data: bytes, where: str, allowed: dict[str, int]) -> dict[str, bytes]:
    """Read the members of an app archive: content by name.

    data: the archive, named `where` in errors. allowed: name -> most bytes, of the members that it may have.
    Raises ConfigError naming the first member or fact that no such archive has.
    """
    if len(data) > LARGEST:
        raise ConfigError(f"{where}: found {len(data)} bytes, allowed {LARGEST}")
    listed = _listed(data, where, len(allowed))
    for member in listed:
        if member.name not in allowed:
            raise ConfigError(
                f"{where}: member {shown(repr(member.name))}: an app carries an experiment and no code; "
                f"allowed: {', '.join(allowed)}"
            )
        elif member.size > allowed[member.name]:
            raise ConfigError(
                f"{where}: member {member.name!r}: found {member.size} bytes, allowed {allowed[member.name]}"
            )
    _check_names([member.name for member in listed], where)
    if sum(member.size for member in listed) > LARGEST:
        raise ConfigError(f"{where}: unpacks to more than {LARGEST} bytes")
    found, place = {}, 0
    for member in listed:
        found[member.name], place = _content(data, member, place, where)
    if place != _end(data, where)[1]:
        raise ConfigError(f"{where}: has bytes that belong to no member")
    _check_manifest(found, where)
    return found


def _end(data: bytes, where: str) -> tuple[int, int]:
    """(members, where their list starts). Raises ConfigError unless the list fills the rest of the file."""
    if len(data) < _END.size:
        raise ConfigError(f"{where}: not an app bundle: {len(data)} bytes")
    mark, disk, start_disk, here, total, size, start, comment = _END.unpack(data[-_END.size :])
    if mark != b"PK\x05\x06" or disk or start_disk or comment:
        raise ConfigError(f"{where}: not an app bundle, or one with bytes after its end")
    if here != total or start + size != len(data) - _END.size:
        raise ConfigError(f"{where}: not an app bundle: its list of members is not where it should be")
    return total, start


def _listed(data: bytes, where: str, most: int) -> list[_Member]:
    count, place = _end(data, where)
    if not 1 <= count <= most:
        raise ConfigError(f"{where}: found {count} members, allowed 1 to {most}")
    found = []
    for _ in range(count):
        line = data[place : place + _LISTED.size]
        if len(line) < _LISTED.size:
            raise ConfigError(f"{where}: not an app bundle: its list of members is cut")
        fields = _LISTED.unpack(line)
        mark, _, _, flags, method, _, _, checksum, packed, size, name_length = fields[:11]
        extra, comment, disk, _, attributes, start = fields[11:]
        raw = data[place + _LISTED.size : place + _LISTED.size + name_length]
        try:
            name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: member {shown(repr(raw))}: its name is no text") from None
        kind = attributes >> 28
        if mark != b"PK\x01\x02" or len(raw) != name_length or not 1 <= name_length <= LONGEST_NAME:
            raise ConfigError(f"{where}: not an app bundle: its list of members is damaged")
        if kind not in (0, 8) or attributes & _FOLDER or name.endswith("/"):
            raise ConfigError(f"{where}: member {shown(repr(name))}: a link or a folder, allowed plain files")
        if flags & ~_UTF8 or method not in (0, 8) or extra or comment or disk:
            raise ConfigError(f"{where}: member {shown(repr(name))}: encrypted, or packed as no app is")
        found.append(_Member(name, method, checksum, packed, size, start, raw))
        place += _LISTED.size + name_length
    if place != len(data) - _END.size:
        raise ConfigError(f"{where}: not an app bundle: more in its list of members than it counts")
    return found


def _content(data: bytes, member: _Member, place: int, where: str) -> tuple[bytes, int]:
    """(content, where the next member starts). Raises ConfigError unless this one starts at place."""

    def fail(what: str) -> ConfigError:
        return ConfigError(f"{where}: member {shown(repr(member.name))}: {what}")

    header = data[place : place + _LOCAL.size]
    if member.start != place or len(header) < _LOCAL.size:
        raise fail("does not follow the one before")
    mark, _, flags, method, _, _, checksum, packed, size, name_length, extra = _LOCAL.unpack(header)
    first = place + _LOCAL.size + name_length
    same = (method, checksum, packed, size) == (member.method, member.checksum, member.packed, member.size)
    if mark != b"PK\x03\x04" or flags & ~_UTF8 or extra or not same:
        raise fail("differs from its line in the list of members")
    if data[place + _LOCAL.size : first] != member.raw or first + packed > len(data):
        raise fail("differs from its line in the list of members")
    content = data[first : first + packed]
    if method == 8:
        unpacking = zlib.decompressobj(-15)
        try:
            content = unpacking.decompress(content, member.size + 1)
        except zlib.error as error:
            raise fail(f"cannot be unpacked: {error}") from error
        if not unpacking.eof or unpacking.unused_data:
            raise fail("unpacks to more than it says")
    if len(content) != member.size or zlib.crc32(content) != member.checksum:
        raise fail("has another size or checksum than it says")
    return content, first + packed


def _check_names(names: list[str], where: str) -> None:
    """Refuse two members that are one file somewhere, and a file that another one takes for a folder."""
    folded = sorted(name.casefold() for name in names)
    for before, after in pairwise(folded):
        if before == after:
            raise ConfigError(f"{where}: member {after!r} is there twice, or twice but for its letters' case")
    files = set(folded)
    for name in folded:
        parts = name.split("/")
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            raise ConfigError(f"{where}: member {name!r} lies in a folder that is a file too")


def _check_manifest(found: dict[str, bytes], where: str) -> None:
    """Raises ConfigError unless the app lists its members as they stand, as Flower does."""
    lines = [
        f"{name},{hashlib.sha256(content).hexdigest()},{len(content) * 8}"
        for name, content in found.items()
        if name != MANIFEST
    ]
    if found.get(MANIFEST) != "\n".join(lines).encode():
        raise ConfigError(f"{where}: member {MANIFEST}: does not list the other members as they are")
