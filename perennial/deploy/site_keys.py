"""Whose key is whose at the gateway, by the operator's folder, in which people edit records by hand too."""

import logging
import os
import re
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from starlette.exceptions import HTTPException as Refusal

from perennial.deploy.certificates import convert_to_pem
from perennial.deploy.federation import OperatorFolder, SiteRecord, read_site_record
from perennial.deploy.handshake import REVOKED, UNREGISTERED
from perennial.foundation.errors import PerennialError, clean_text
from perennial.foundation.names import SITE_NAME

log = logging.getLogger("perennial.gateway")
Stamp = tuple[int, ...]
"""Of a file: changes whenever the file does, whatever the clock says."""


@dataclass(frozen=True)
class _Site:
    """A site as its two files say. key: as Flower takes it."""

    stamps: tuple[Stamp, Stamp]
    record: SiteRecord
    key: bytes


class Keys:
    """Whose key is whose; what changed in sites/ is read again.

    A site whose record or key cannot be read counts as not registered, and keeps no other one out.
    """

    def __init__(self, folder: OperatorFolder) -> None:
        self._folder = folder
        self._stamps: dict[str, Stamp] | None = None
        self._sites: dict[str, _Site] = {}
        self._faults: dict[str, str] = {}
        self._names: dict[bytes, str] = {}
        self.records: dict[str, SiteRecord] = {}

    def name(self, key: bytes) -> str:
        """The site that has a public key (PEM). Raises Refusal for a key that is not registered."""
        self.read()
        name = self._names.get(key, "")
        state = self.records[name].state if name else "added"
        if state != "registered":
            raise Refusal(401, REVOKED if state == "revoked" else UNREGISTERED)
        return name

    def read(self) -> None:
        """Look whether a site was added, registered or revoked. Raises OSError without the folder sites/."""
        with os.scandir(self._folder.path / "sites") as entries:
            # taken first, so that a change while this reads is seen the next time
            stamps = {entry.name: _take_stamp(entry) for entry in entries}
        if stamps == self._stamps:
            return
        sites, faults = dict[str, _Site](), dict[str, str]()
        for file in sorted(stamps):
            name = file.removesuffix(".yaml")
            if name == file or not re.fullmatch(SITE_NAME, name):
                continue
            try:
                sites[name] = self._read_site(name, (stamps[file], stamps.get(f"{name}.pub", ())))
            except (OSError, ValueError, UnsupportedAlgorithm, PerennialError) as error:
                faults[name] = clean_text(str(error), 300)
        for name, reason in faults.items() - self._faults.items():
            log.warning("%s counts as not registered until this is mended: %s", name, reason)
        # of two sites with one key, the one that may not pass counts
        names = sorted(sites, key=lambda name: sites[name].record.state != "registered")
        self._names = {sites[name].key: name for name in names}
        self.records = {name: site.record for name, site in sites.items()}
        self.records |= dict.fromkeys(faults, SiteRecord())
        # what could not be read is tried again at the next look, whether or not its files change
        self._sites, self._faults, self._stamps = sites, faults, None if faults else stamps

    def _read_site(self, name: str, stamps: tuple[Stamp, Stamp]) -> _Site:
        """A site, as it was read before unless a file of it has changed."""
        known, key = self._sites.get(name), self._folder.locate_public_key(name)
        if known is not None and known.stamps == stamps:
            return known
        return _Site(stamps, read_site_record(key.with_name(f"{name}.yaml")), convert_to_pem(key))


def _take_stamp(entry: os.DirEntry[str]) -> Stamp:
    """A file's stamp; () where it has just gone, or is a link that leads nowhere."""
    try:
        found = entry.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
