"""The operator's folder: one federation, everything that the operator owns of it.

deploy.yaml         name, hosts, how the SuperLink is reached
authority/          the certificate authority; its key never leaves this folder
certificates/       ca.crt (what sites trust), server.pem, server.key
sites/NAME.pub      one site's public key; sites/NAME.yaml: whether it is registered
apps/NAME/          each submitted experiment with the code that runs it; apps/*.fab: as sites get it
bundles/            what hospitals are given
state/              the SuperLink's database, the run folders, Flower's own settings
"""

import operator
import os
import re
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, PositiveInt

from perennial.config.yaml_file import read_yaml, validate
from perennial.deploy.certificates import (
    Issued,
    check_public_line,
    compute_fingerprint,
    make_authority,
    make_server,
    write_issued,
)
from perennial.foundation.errors import ConfigError, StateError, suggest_nearest
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.names import NODES, SITE_NAME, write_registered
from perennial.foundation.plain import Block
from perennial.server.control import CONTROL

DEPLOY = "deploy.yaml"
FORMER = ("health_port", "health_host")
"""Keys of 0.2.0, whose health server is gone."""
IN_CONTAINER = Path("/operator")
"""Where the operator's folder is mounted in the SuperLink's container."""


class Federation(Block):
    """deploy.yaml. hosts: names and addresses by which sites reach the SuperLink, the first one in bundles.

    control_port: of the Control API, which listens on loopback only: whoever reaches it can start runs.
    plugins: installed packages, or folders, with other people's methods that experiments may name here; the
    sites' own site.yaml says what they may name there.
    """

    name: str = Field(pattern=SITE_NAME)
    hosts: tuple[str, ...] = Field(min_length=1)
    runtime: Literal["compose", "process"] = "compose"
    fleet_port: PositiveInt = Field(default=9092, lt=65536)
    control_port: PositiveInt = Field(default=8000, lt=65536)
    fleet_host: str = "0.0.0.0"
    plugins: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)


class SiteRecord(Block):
    """The state of one site. node: Flower's id once registered, as text."""

    state: Literal["added", "registered", "revoked"] = "added"
    node: str = ""


def read_site_record(path: Path) -> SiteRecord:
    """The record in a file. Raises ConfigError when it is missing or not one."""
    return validate(SiteRecord, read_yaml(path), str(path))


class OperatorFolder:
    """A federation's folder and its paths."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when path is not such a folder."""
        if not (path / DEPLOY).is_file():
            raise ConfigError(f"{path}: no {DEPLOY} here; make a federation with `perennial deploy init`")
        self.path = path.absolute()
        content = read_yaml(path / DEPLOY)
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in FORMER}
        self.federation = validate(Federation, content, str(path / DEPLOY))
        self.authority_certificate = self.path / "authority" / "ca.crt"
        self.authority_key = self.path / "authority" / "ca.key"
        self.certificates = self.path / "certificates"
        self.state = self.path / "state"
        self.apps = self.path / "apps"

    @property
    def root(self) -> Path:
        """This folder's path for the SuperLink: inside its container with compose, else as here."""
        return IN_CONTAINER if self.federation.runtime == "compose" else self.path

    def list_plugins(self, root: Path) -> list[str]:
        """The plug-ins of deploy.yaml; a folder's path is relative to root, this folder's own."""
        return [str(root / each) if "/" in each else each for each in self.federation.plugins]

    @property
    def fleet_address(self) -> str:
        """HOST:PORT at which sites reach the SuperLink."""
        return f"{self.federation.hosts[0]}:{self.federation.fleet_port}"

    def sites(self) -> dict[str, SiteRecord]:
        """The record of each site, by name."""
        paths = sorted((self.path / "sites").glob("*.yaml"))
        return {path.stem: read_site_record(path) for path in paths}

    def site(self, name: str) -> SiteRecord:
        """The record of one site. Raises ConfigError, which names all sites, when there is none."""
        sites = self.sites()
        if name not in sites:
            known = ", ".join(sites) or "none yet"
            raise ConfigError(f"site {name!r}: not added{suggest_nearest(name, sites)}; sites: {known}")
        return sites[name]

    def locate_public_key(self, name: str) -> Path:
        """Path of a site's public key."""
        return self.path / "sites" / f"{name}.pub"

    def write_site(self, name: str, record: SiteRecord) -> None:
        """Replace the record of one site."""
        text = yaml.safe_dump(record.model_dump(), sort_keys=False)
        replace_file(self.path / "sites" / f"{name}.yaml", text.encode(), mode=0o644)

    def write_names(self) -> None:
        """Write the name of each registered node for the server, so that no node can claim another's name."""
        registered = {site.node: name for name, site in self.sites().items() if site.state == "registered"}
        write_registered(self.path / NODES, registered)

    def add_site(self, name: str, public_key: bytes) -> str:
        """Add a site, or give an unregistered one a new key; returns the key's fingerprint.

        public_key: ECDSA P-384, an OpenSSH line. Raises ConfigError when the name or key is not valid, or
        another site has the key; StateError when the site is registered with another key, or was shut out
        with this one.
        """
        if not re.fullmatch(SITE_NAME, name):
            raise ConfigError(
                f"site name: found {name!r}, allowed letters, digits, '.', '_' and '-', 64 at most"
            )
        line = check_public_line(public_key, f"public key of {name}")
        sites = self.sites()
        for other in sites:
            if other != name and self.locate_public_key(other).read_bytes().split()[1] == line.split()[1]:
                raise ConfigError(f"public key of {name}: site {other!r} has this key; each site has its own")
        state = sites[name].state if name in sites else "added"
        if state != "added":
            same = self.locate_public_key(name).read_bytes().split()[1] == line.split()[1]
            if same and state == "registered":
                return compute_fingerprint(line)
            if same or state == "registered":
                raise StateError(
                    f"site {name!r}: {state} with {'this' if same else 'another'} key; a new key comes in "
                    "after `perennial deploy revoke`"
                )
        replace_file(self.locate_public_key(name), line, mode=0o644)
        self.write_site(name, SiteRecord())
        return compute_fingerprint(line)

    def renew_server(self, days: int, hosts: tuple[str, ...] = (), *, new_authority: bool = False) -> None:
        """Issue a new server certificate, by the authority that ca.crt alone names from now on.

        hosts: replace the names by which sites reach the SuperLink. Raises ConfigError for bad hosts or days,
        and changes nothing then.
        """
        hosts = hosts or self.federation.hosts
        authority = (
            make_authority(self.federation.name)
            if new_authority
            else Issued(self.authority_certificate.read_bytes(), self.authority_key.read_bytes())
        )
        issued = make_server(authority, hosts, days)
        if hosts != self.federation.hosts:
            self.federation = self.federation.model_copy(update={"hosts": hosts})
            _write_federation(self.path, self.federation)
        if new_authority:
            write_issued(authority, self.authority_certificate, self.authority_key)
        write_issued(issued, self.certificates / "server.pem", self.certificates / "server.key")
        replace_file(self.certificates / "ca.crt", authority.certificate, mode=0o644)
        give_to_owner(self.path, self.certificates)


def create_operator_folder(path: Path, federation: Federation, days: int) -> OperatorFolder:
    """Create a new federation at path: authority, server certificate and settings.

    Raises StateError when path is no folder or is not empty.
    """
    # refuses bad hosts and days before anything is written
    make_server(make_authority(federation.name), federation.hosts, days)
    make_folder(path, mode=0o777)
    if any(path.iterdir()):
        raise StateError(f"{path}: not empty; choose a new folder for a new federation")
    keep_out_of_git(path)
    for name in ("authority", "certificates", "bundles", "state"):
        (path / name).mkdir(mode=0o700)
    for name in ("sites", "apps", "state/flower", "state/runs"):
        (path / name).mkdir(mode=0o755)
    _write_federation(path, federation)
    folder = OperatorFolder(path)
    # last, because it gives the certificates to the user of the containers; root may not write there then
    folder.renew_server(days, new_authority=True)
    make_folder(folder.state / "runs" / CONTROL)
    give_to_owner(path, folder.state)
    return folder


def keep_out_of_git(folder: Path) -> None:
    """Write a .gitignore so that a repository around the folder does not take the keys in.

    A .gitignore that is there already stays.
    """
    if not (folder / ".gitignore").exists():
        replace_file(folder / ".gitignore", b"*\n", mode=0o644)


def give_to_owner(path: Path, folder: Path) -> None:
    """If root runs this, give `folder` to the containers' user: who owns the operator's folder, or 1000."""
    if os.getuid():
        return
    owner = path.stat()
    user, group = (owner.st_uid, owner.st_gid) if owner.st_uid else (1000, 1000)
    for found in (folder, *folder.rglob("*")):
        os.chown(found, user, group)


def _write_federation(path: Path, federation: Federation) -> None:
    text = yaml.safe_dump(federation.model_dump(mode="json"), sort_keys=False)
    replace_file(path / DEPLOY, text.encode(), mode=0o644)
