"""A site's long-lived processes: Flower's SuperNode, once everything was checked, with a warm ClientApp."""

import http.client
import os
import re
import socket
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from perennial.client.activity import note_unapproved
from perennial.client.secure_state import certify_own_key
from perennial.config.approval import Approval
from perennial.config.site import FLOWER_HOME, Connection, SiteConfig, load_site_config
from perennial.deploy.app_container import Half, Partner
from perennial.deploy.application import list_approved_apps, require_read_only
from perennial.deploy.certificates import Validity, read_node_key, read_validity
from perennial.deploy.handshake import Unreachable, check_admission
from perennial.deploy.processes import Runtime, find_program, require_flower, run_supervised
from perennial.foundation.errors import NOT_APPROVED, ConfigError, StateError
from perennial.foundation.files import hold_folder
from perennial.foundation.heartbeat import keep_beating, renew
from perennial.foundation.site_log import log
from perennial.privacy.signed_sums import certify

UNAPPROVED = re.compile(rb"%s: ([0-9a-f]{64})" % NOT_APPROVED.encode())
"""What Flower logs when an app arrived that is not approved (deploy/pinned_app.py)."""
GIVEN_UP = b"SSL/TLS handshake error detected"
"""What Flower says when a handshake was cut. Its SuperNode lives on then, and asks for nothing any more."""
ALIVE = "supernode.alive"
"""In a site's state_dir: its heartbeat."""
ANSWERED = "superlink.answered"
"""In a site's state_dir: its time is when the SuperLink last answered this site, which had proved its key."""
SOON = 30
"""Days before a certificate's end at which a person is told."""


@dataclass(frozen=True)
class SiteSetup:
    """A site's checked set-up. folder: of site.yaml. authority: the file of the authorities."""

    folder: Path
    config: SiteConfig
    connection: Connection
    key: EllipticCurvePrivateKey
    authority: Path
    authorities: list[Validity]
    apps: list[Approval]


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
    connection, config, folder = read_connection(path), load_site_config(path), path.absolute().parent
    key, authority = read_node_key(folder / connection.key), folder / connection.ca
    require_read_only(folder / FLOWER_HOME, config.approvals)
    authorities, apps = read_validity(authority), list_approved_apps(config.approvals)
    return SiteSetup(folder, config, connection, key, authority, authorities, apps)


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


def try_check(check: Callable[[Connection], object], connection: Connection) -> bool:
    """Whether a check of the SuperNode passes: that it serves (check_health), or that its port is free."""
    try:
        check(connection)
    except StateError:
        return False
    return True


def describe_port(connection: Connection, alive: bool = False) -> str:
    """A sentence: the SuperNode runs, or its port is free. Raises StateError if it is taken.

    alive: whether the SuperNode gives a sign of life in state_dir, as one in a container does, whose port
    cannot be asked from elsewhere.
    """
    if try_check(check_health, connection):
        return f"one runs already and serves, at port {connection.runtime_port}"
    if alive:
        return "one runs already; it gives a sign of life, and its port is closed to this command"
    require_free_port(connection)
    return f"does not run; port {connection.runtime_port} is free for it"


def check_superlink(setup: SiteSetup, alive: bool = False) -> None:
    """Connect and prove this site's key, as a SuperNode does. Raises StateError that says what to do.

    alive: as for describe_port(). A SuperNode that starts leaves it out: the sign of life may be that of one
    which was killed seconds ago, and the SuperLink refuses the new one as long as it holds the old one.
    """
    runs = alive or try_check(check_health, setup.connection)
    check_admission(setup.connection.superlink, setup.authority, setup.key, connected=runs)


def start_supernode(path: Path, half: Half | None = None) -> None:
    """Become the SuperNode of this site, and what runs its apps; or one half of them, in its own container.

    Certificates and keys that cannot work are errors; a SuperLink that cannot be reached now is tried again
    by the SuperNode for as long as it takes. Raises StateError where the half with the apps can read the key.
    """
    require_flower()
    if half == Half.APP:
        _run_apps(path)
    setup = read_setup(path)
    for authority in setup.authorities:
        if authority.days_left < SOON:
            log.warning("%s: %s", setup.connection.ca, authority)
    require_free_port(setup.connection)
    state = setup.config.state_dir
    try:
        check_superlink(setup)
    except Unreachable as problem:
        log.warning("%s The SuperNode keeps trying.", problem)
    certify_own_key(state, lambda own: certify(setup.key, setup.config.site, own))

    def explain() -> str:
        try:
            check_superlink(setup)
        except (StateError, ConfigError) as problem:
            return str(problem)
        renew(state / ANSWERED)
        return ""

    runtime = _build_runtime(setup.folder, setup.config, setup.connection)
    runtime.make_secret()
    port = str(runtime.port)
    commands = {
        "the SuperNode": [
            *(find_program("flower-supernode"), "--superlink", setup.connection.superlink),
            *("--root-certificates", str(setup.authority)),
            *("--auth-supernode-private-key", str(setup.folder / setup.connection.key)),
            *("--host", "127.0.0.1", "--port", port, "--node-config", f'site="{path.absolute()}"'),
            *("--isolation", "process", *runtime.secret),
        ],
        **(_list_apps(runtime, setup.config) if half is None else {}),
    }
    with hold_folder(state / "supernode", "the SuperNode"), keep_beating(state / ALIVE):
        partner = None if half is None else Partner.let_in(runtime.folder, runtime.port)
        status = run_supervised(
            commands, runtime.environment, explain, explain, _build_reader(state), partner
        )
    os._exit(status)


def _run_apps(path: Path) -> NoReturn:
    """Run the apps of a SuperNode that is in another container."""
    config, connection, folder = load_site_config(path), read_connection(path), path.absolute().parent
    with suppress(OSError):
        if (folder / connection.key).read_bytes():
            raise StateError(
                f"{folder / connection.key}: can be read where apps run, and must not be; see "
                "`superexec-clientapp` in compose.yaml"
            )
    require_read_only(folder / FLOWER_HOME, config.approvals)
    runtime = _build_runtime(folder, config, connection)
    with hold_folder(config.state_dir / "app", "the apps' process"):
        partner = Partner.join(runtime.folder, runtime.port)
        commands, read = _list_apps(runtime, config), _build_reader(config.state_dir)
        status = run_supervised(commands, runtime.environment, lambda: "", read=read, partner=partner)
    os._exit(status)


def _build_runtime(folder: Path, config: SiteConfig, connection: Connection) -> Runtime:
    private, home = config.state_dir / "process", folder / FLOWER_HOME
    return Runtime(private, home, connection.runtime_port, ("--insecure",))


def _list_apps(runtime: Runtime, config: SiteConfig) -> dict[str, list[str]]:
    handlers = ("app", "door", "handlers", "secure_answers", "site")
    modules = [*(f"perennial.client.{module}" for module in handlers), "perennial.learning.private_training"]
    if config.policy.require_privacy in ("sample", "patient"):
        # Opacus takes seconds of a processor, which each turn under DP-SGD would pay
        modules.append("opacus.grad_sample")
    return runtime.app("flwr-clientapp", *modules, approvals=config.approvals)


def _build_reader(state: Path) -> Callable[[bytes], bool]:
    """What supervise() calls with each line of Flower's processes."""

    def read(line: bytes) -> bool:
        if found := UNAPPROVED.search(line):
            note_unapproved(state, found[1].decode())
        return GIVEN_UP in line

    return read
