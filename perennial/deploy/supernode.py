"""A site's long-lived process: everything is checked, then this process becomes Flower's SuperNode."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from perennial.client.secure_state import certify_own_key
from perennial.config.site import Connection, SiteConfig, load_site_config
from perennial.deploy import stock
from perennial.deploy.approval import ApprovedApp, approved_apps, require_read_only
from perennial.deploy.certificates import Validity, read_validity
from perennial.deploy.handshake import Unreachable, check_handshake
from perennial.deploy.health import check_health
from perennial.deploy.keys import fingerprint, public_line, read_node_key
from perennial.deploy.predecessor import left_node, note_node, place
from perennial.deploy.processes import supervise
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import sole_owner
from perennial.foundation.heartbeat import beating, renew
from perennial.foundation.site_log import log
from perennial.privacy.signed_sums import certify

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
    apps: list[ApprovedApp]

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
    if not connection.any_app:
        require_read_only(folder / connection.flower_home, config.approvals)
    authorities = read_validity(folder / connection.ca)
    apps = approved_apps(config.approvals)
    return SiteSetup(folder, config, connection, fingerprint(public_line(key)), authorities, apps)


def health_address(connection: Connection) -> str:
    """HOST:PORT of the SuperNode's health server."""
    return f"127.0.0.1:{connection.runtime_port + 1}"


def require_free_ports(connection: Connection) -> None:
    """Raises StateError when another process, such as a second SuperNode, uses a port that this one needs."""
    for port in (connection.runtime_port, connection.runtime_port + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise StateError(
                    f"connection.runtime_port: {connection.runtime_port} and the next port are needed on "
                    f"loopback, and {port} is in use ({error.strerror}); is this site running already? A "
                    "second SuperNode on this machine needs another runtime_port in its site.yaml"
                ) from error


def ports_are_free(connection: Connection) -> bool:
    """Whether the ports that the SuperNode needs are unused; False too while it runs itself."""
    try:
        require_free_ports(connection)
    except StateError:
        return False
    return True


def runs_here(connection: Connection) -> bool:
    """Whether this site's SuperNode runs, and its health server says that it serves."""
    try:
        check_health(health_address(connection))
    except StateError:
        return False
    return True


def check_superlink(setup: SiteSetup) -> None:
    """Connect and prove this site's key, as a SuperNode does. Raises StateError that says what to do."""
    authority, address = setup.path(setup.connection.ca), setup.connection.superlink
    check_handshake(address, authority)
    key = read_node_key(setup.path(setup.connection.key))
    own_place = runs_here(setup.connection) or left_node(setup.config.state_dir) is not None
    stock.check_admission(address, authority, key, connected=own_place)


def deregister_dead_node(setup: SiteSetup) -> None:
    """Sign off from the SuperLink for this site's last SuperNode if it was killed. Raises Unreachable."""
    if (node := left_node(setup.config.state_dir)) is not None:
        key = read_node_key(setup.path(setup.connection.key))
        address, authority = setup.connection.superlink, setup.path(setup.connection.ca)
        if stock.speaks_http():
            return stock.sign_off(address, authority, key)
        from perennial.deploy.admission import sign_off

        sign_off(address, authority, key, node)


def _run_stock(setup: SiteSetup, path: Path, explain: Callable[[], str]) -> NoReturn:
    """Be the site's processes of Flower 1.40 and later. path: site.yaml."""
    state = setup.config.state_dir
    commands, environment = stock.supernode_processes(setup, path)

    def meanwhile() -> None:
        try:
            check_superlink(setup)
        except (StateError, ConfigError):
            return
        renew(state / ANSWERED)

    with sole_owner(place(state), "the SuperNode"), beating(state / ALIVE):
        note_node(state, 0)
        status = supervise(commands, environment, explain, meanwhile)
    os._exit(status)


def ports_in_words(connection: Connection) -> str:
    """A sentence: the SuperNode runs, or its ports are free. Raises StateError if they are taken."""
    try:
        require_free_ports(connection)
    except StateError:
        if runs_here(connection):
            return f"one runs already and serves, at port {connection.runtime_port}"
        raise
    return f"does not run; ports {connection.runtime_port} and {connection.runtime_port + 1} are free for it"


def start_supernode(path: Path) -> None:
    """Become the SuperNode of this site.

    Certificates and keys that cannot work are errors; a SuperLink that cannot be reached now is tried again
    by the SuperNode for as long as it takes.
    """
    setup = read_setup(path)
    connection = setup.connection
    for authority in setup.authorities:
        if authority.days_left < SOON:
            log.warning("%s: %s", connection.ca, authority)
    require_free_ports(connection)
    try:
        check_superlink(setup)
        deregister_dead_node(setup)
    except Unreachable as problem:
        log.warning("%s The SuperNode keeps trying.", problem)
    key = read_node_key(setup.path(connection.key))
    certify_own_key(setup.config.state_dir, lambda own: certify(key, setup.config.site, own))

    def explain() -> str:
        try:
            check_superlink(setup)
        except (StateError, ConfigError) as problem:
            return str(problem)
        return ""

    if stock.speaks_http():
        _run_stock(setup, path.absolute(), explain)
    home = setup.path(connection.flower_home)
    home.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "perennial.deploy.supernode_process", str(path.absolute())),
        *("--superlink", connection.superlink),
        *("--root-certificates", str(setup.path(connection.ca))),
        *("--auth-supernode-private-key", str(setup.path(connection.key))),
        *("--port", str(connection.runtime_port), "--health-server-address", health_address(connection)),
        *("--node-config", f'site="{path.absolute()}"'),
    ]
    if connection.trusted_entities is not None:
        command += ["--trusted-entities", str(setup.path(connection.trusted_entities))]
    # Flower starts its helpers by name, so they must come from this environment
    binaries = str(Path(sys.executable).parent)
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    os._exit(supervise({"the SuperNode": command}, environment, explain))
