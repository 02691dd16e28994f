"""A site's long-lived processes: Flower's SuperNode, once everything was checked, with a warm ClientApp."""

import http.client
import os
import re
import socket
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perennial.client.activity import note_unapproved
from perennial.client.secure_state import certify_own_key
from perennial.config.approval import Approval
from perennial.config.site import FLOWER_HOME, Connection, SiteConfig, load_site_config
from perennial.deploy.approval import approved_apps, require_read_only
from perennial.deploy.certificates import Validity, fingerprint, public_line, read_node_key, read_validity
from perennial.deploy.handshake import Unreachable, check_admission
from perennial.deploy.processes import program, require_flower, supervise, warm
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import sole_owner
from perennial.foundation.heartbeat import beating, renew
from perennial.foundation.site_log import log
from perennial.privacy.signed_sums import certify

NOT_UNPACKED = re.compile(rb"\[Errno (?:13|30)\][^']*'[^']*/apps/[^'/]*\.([0-9a-f]{8})'")
"""What Flower says of an app that is not approved: its folder cannot be made."""
ALIVE = "supernode.alive"
"""In a site's state_dir: its heartbeat."""
ANSWERED = "superlink.answered"
"""In a site's state_dir: its time is when the SuperLink last answered this site, which had proved its key."""
SOON = 30
"""Days before a certificate's end at which a person is told."""


@dataclass(frozen=True)
class SiteSetup:
    """A site's checked set-up. folder: of site.yaml."""

    folder: Path
    config: SiteConfig
    connection: Connection
    fingerprint: str
    authorities: list[Validity]
    apps: list[Approval]

    def path(self, relative: Path) -> Path:
        """Absolute path for one of the connection section."""
        return self.folder / relative


def read_connection(path: Path) -> Connection:
    """The connection of a site.yaml. Raises ConfigError when it has none."""
    connection = load_site_config(path).connection
    if connection is None:
        raise ConfigError(f"{path}: key 'connection' is missing; the SuperNode needs connection.superlink")
    return connection


def read_setup(path: Path) -> SiteSetup:
    """Read a site's set-up and check all of it that needs no network. path: site.yaml.

    Raises ConfigError or StateError naming the file and what to do.
    """
    path = path.absolute()
    connection, config = read_connection(path), load_site_config(path)
    folder = path.parent
    key = read_node_key(folder / connection.key)
    require_read_only(folder / FLOWER_HOME, config.approvals)
    authorities = read_validity(folder / connection.ca)
    apps = approved_apps(config.approvals)
    return SiteSetup(folder, config, connection, fingerprint(public_line(key)), authorities, apps)


def check_health(connection: Connection) -> None:
    """Ask the SuperNode's Runtime API whether it serves. Raises StateError when it does not."""
    url = f"http://127.0.0.1:{connection.runtime_port}/health"
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
    except (OSError, http.client.HTTPException) as error:
        raise StateError(f"{url}: no health answer; the SuperNode is not running or stuck") from error


def require_free_port(connection: Connection) -> None:
    """Raises StateError when another process, such as a second SuperNode, uses the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", connection.runtime_port))
        except OSError as error:
            raise StateError(
                f"connection.runtime_port: {connection.runtime_port} on loopback is in use "
                f"({error.strerror}); is this site running already? A second SuperNode on this machine needs "
                "another runtime_port in its site.yaml"
            ) from error


def holds(check: Callable[[Connection], object], connection: Connection) -> bool:
    """Whether a check of the SuperNode passes: that it serves (check_health), or that its port is free."""
    try:
        check(connection)
    except StateError:
        return False
    return True


def port_in_words(connection: Connection) -> str:
    """A sentence: the SuperNode runs, or its port is free. Raises StateError if it is taken."""
    if holds(check_health, connection):
        return f"one runs already and serves, at port {connection.runtime_port}"
    require_free_port(connection)
    return f"does not run; port {connection.runtime_port} is free for it"


def check_superlink(setup: SiteSetup) -> None:
    """Connect and prove this site's key, as a SuperNode does. Raises StateError that says what to do."""
    connection = setup.connection
    key, authority = read_node_key(setup.path(connection.key)), setup.path(connection.ca)
    check_admission(connection.superlink, authority, key, connected=holds(check_health, connection))


def supernode_processes(setup: SiteSetup, site: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(command line by name, environment) of everything that a site consists of. site: its site.yaml."""
    connection = setup.connection
    commands, environment, secret = warm(
        setup.config.state_dir / "process",
        setup.folder / FLOWER_HOME,
        "flwr-clientapp",
        *(f"perennial.client.{module}" for module in ("app", "door", "handlers", "secure_answers", "site")),
        "perennial.learning.private_training",
    )
    port = str(connection.runtime_port)
    return {
        "the SuperNode": [
            *(program("flower-supernode"), "--superlink", connection.superlink),
            *("--root-certificates", str(setup.path(connection.ca))),
            *("--auth-supernode-private-key", str(setup.path(connection.key))),
            *("--host", "127.0.0.1", "--port", port, "--node-config", f'site="{site}"'),
            *("--isolation", "process", *secret),
        ],
        **commands,
        "the SuperExec": [
            *(program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{port}", "--insecure"),
            *secret,
        ],
    }, environment


def start_supernode(path: Path) -> None:
    """Become the SuperNode of this site.

    Certificates and keys that cannot work are errors; a SuperLink that cannot be reached now is tried again
    by the SuperNode for as long as it takes.
    """
    require_flower()
    setup = read_setup(path)
    connection = setup.connection
    for authority in setup.authorities:
        if authority.days_left < SOON:
            log.warning("%s: %s", connection.ca, authority)
    require_free_port(connection)
    key = read_node_key(setup.path(connection.key))
    state = setup.config.state_dir
    try:
        check_superlink(setup)
    except Unreachable as problem:
        log.warning("%s The SuperNode keeps trying.", problem)
    certify_own_key(state, lambda own: certify(key, setup.config.site, own))

    def explain() -> str:
        try:
            check_superlink(setup)
        except (StateError, ConfigError) as problem:
            return str(problem)
        renew(state / ANSWERED)
        return ""

    def read(line: bytes) -> None:
        if found := NOT_UNPACKED.search(line):
            note_unapproved(state, found[1].decode())

    commands, environment = supernode_processes(setup, path.absolute())
    with sole_owner(state / "supernode", "the SuperNode"), beating(state / ALIVE):
        status = supervise(commands, environment, explain, explain, read)
    os._exit(status)
