"""Flower 1.40 and later as they are: the processes of SuperLink and site, and how a site checks its key.

Flower's own commands run unchanged, in `--isolation process` with a secret, so that no other user of the
machine is given a task. What Perennial adds are the gateway (deploy/gateway.py) and a warm process for each
kind of app (deploy/warm.py).
"""

import base64
import datetime
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from perennial.deploy.handshake import Unreachable
from perennial.deploy.reasons import CLOCK, CONNECTED, REASONS
from perennial.deploy.warm import SOCKET, write_stand_in
from perennial.foundation.errors import StateError, shown
from perennial.foundation.files import make_folder, replace_file

if TYPE_CHECKING:
    from perennial.deploy.federation import OperatorFolder
    from perennial.deploy.supernode import SiteSetup

CLIENT, SERVER = "flwr-clientapp", "flwr-serverapp"
MODULES = ("torch", "numpy", "yaml", "safetensors.torch", "httpcore")
LOOK = "0.05"
"""Seconds between two looks of a SuperExec for a task."""
SECONDS = 10


def speaks_http() -> bool:
    """Whether the installed Flower has its Fleet API over HTTP, as 1.40 and later have."""
    return tuple(int(part) for part in version("flwr").split(".")[:2]) >= (1, 40)


def superlink_processes(folder: "OperatorFolder") -> tuple[dict[str, list[str]], dict[str, str]]:
    """(command line by name, environment) of everything that serves a federation."""
    certificates, federation = folder.certificates, folder.federation
    private = _private(folder.state / "process")
    control = f"127.0.0.1:{federation.control_port}"
    authority = str(certificates / "ca.crt")
    secret = _secret(private)
    commands = {
        "the SuperLink": [
            *(_program("flower-superlink"), "--ssl-ca-certfile", authority),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(folder.state / "superlink.db")),
            *("--host", "127.0.0.1", "--port", str(federation.control_port)),
            *("--health-server-address", f"{federation.health_host}:{federation.health_port}"),
            *("--isolation", "process", "--superexec-auth-secret-file", secret),
        ],
        "the warm ServerApp": _warm(private, SERVER, "perennial.server.app"),
        "the SuperExec": [
            *(_program("flower-superexec"), "--runtime-api-address", control),
            *("--root-certificates", authority, "--superexec-auth-secret-file", secret),
        ],
        "the gateway": [sys.executable, "-m", "perennial.deploy.gateway", str(folder.path)],
    }
    return commands, _environment(private, folder.state / "flower", SERVER)


def supernode_processes(setup: "SiteSetup", site: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(command line by name, environment) of everything that a site consists of. site: its site.yaml."""
    connection = setup.connection
    private = _private(setup.config.state_dir / "process")
    secret = _secret(private)
    port = str(connection.runtime_port)
    commands = {
        "the SuperNode": [
            *(_program("flower-supernode"), "--superlink", connection.superlink),
            *("--root-certificates", str(setup.path(connection.ca))),
            *("--auth-supernode-private-key", str(setup.path(connection.key))),
            *("--host", "127.0.0.1", "--port", port),
            *("--health-server-address", f"127.0.0.1:{connection.runtime_port + 1}"),
            *("--node-config", f'site="{site}"'),
            *("--isolation", "process", "--superexec-auth-secret-file", secret),
        ],
        "the warm ClientApp": _warm(private, CLIENT, "perennial.client.app"),
        "the SuperExec": [
            *(_program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{port}", "--insecure"),
            *("--superexec-auth-secret-file", secret),
        ],
    }
    if connection.trusted_entities is not None:
        commands["the SuperNode"] += ["--trusted-entities", str(setup.path(connection.trusted_entities))]
    return commands, _environment(private, setup.path(connection.flower_home), CLIENT)


def signed_headers(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """Headers that prove a node's key, as Flower's SuperNode sends them: a signed time."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-signature": base64.b64encode(signature).decode(),
        "flwr-timestamp": now,
    }


def check_admission(
    address: str, authority: Path, key: ec.EllipticCurvePrivateKey, connected: bool = False
) -> None:
    """Prove to the operator's gateway that this site holds its key, within SECONDS.

    connected: whether this site's own SuperNode runs, so that one is expected to be connected.
    Raises StateError that says why it would not let the site in, and what to do; Unreachable if it does not
    answer.
    """
    if not speaks_http():
        from perennial.deploy import admission

        return admission.check_admission(address, authority, key, connected)
    if _ask_gateway("admission", address, authority, key) == "connected" and not connected:
        raise StateError(f"{address}: {CONNECTED}")


def sign_off(address: str, authority: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Tell the gateway that this site's last SuperNode is gone. Raises StateError or Unreachable."""
    _ask_gateway("sign-off", address, authority, key)


def _ask_gateway(what: str, address: str, authority: Path, key: ec.EllipticCurvePrivateKey) -> str:
    context = ssl.create_default_context(cafile=authority)
    headers = signed_headers(key)
    request = urllib.request.Request(f"https://{address}/{what}", data=b"", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as reply:
            return reply.read(100).decode()
    except urllib.error.HTTPError as refusal:
        said = refusal.read(4096).decode(errors="replace").strip()
        if said in (*REASONS, CLOCK):
            raise StateError(f"{address}: {said}") from None
        raise StateError(
            f"{address}: does not check this site's key as a gateway of Perennial does: {shown(said, 300)}"
        ) from None
    except OSError as error:
        said = shown(str(error), 300)
        raise Unreachable(f"{address}: no answer about this site's key ({said}).") from error


def _private(folder: Path) -> Path:
    make_folder(folder)
    folder.chmod(0o700)
    return folder


def _secret(folder: Path) -> str:
    """Path of the secret that a SuperExec shows, made anew at each start."""
    path = folder / "superexec.secret"
    replace_file(path, secrets.token_bytes(32), mode=0o600)
    return str(path)


def _warm(folder: Path, script: str, *modules: str) -> list[str]:
    write_stand_in(folder / "bin", script)
    return [sys.executable, "-m", "perennial.deploy.warm", str(folder / "warm"), script, *MODULES, *modules]


def _environment(folder: Path, home: Path, script: str) -> dict[str, str]:
    """Environment variables; the stand-in comes first on PATH, then this environment's own programs."""
    first, own = str(folder / "bin"), str(Path(sys.executable).parent)
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": LOOK,
        SOCKET: str(folder / "warm"),
        "PATH": os.pathsep.join((first, own, os.environ.get("PATH", ""))),
    }


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
