"""The operator's long-lived processes: Flower's SuperLink as it is, with a gateway and a warm ServerApp.

Flower's own commands run unchanged, in `--isolation process` with a secret, so that no other user of the
machine is given a task.
"""

import os
import sys

from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.processes import program, require_flower, supervise, warm
from perennial.foundation.errors import StateError


def start_superlink(folder: OperatorFolder) -> None:
    """Become the SuperLink. Raises StateError when the server certificate has expired."""
    require_flower()
    for certificate in read_validity(folder.certificates / "server.pem"):
        if certificate.days_left < 0:
            raise StateError(f"{certificate}; renew it with `perennial deploy rotate`")
    os._exit(supervise(*superlink_processes(folder), lambda: ""))


def superlink_processes(folder: OperatorFolder) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(command line by name, environment) of everything that serves a federation."""
    certificates, federation = folder.certificates, folder.federation
    authority = str(certificates / "ca.crt")
    commands, environment, secret = warm(
        folder.state / "process", folder.state / "flower", "flwr-serverapp", "perennial.server.app"
    )
    return {
        # Control, Runtime and Fleet API share a port, and the first asks nobody who he is: loopback alone
        "the SuperLink": [
            *(program("flower-superlink"), "--ssl-ca-certfile", authority),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(folder.state / "superlink.db")),
            *("--host", "127.0.0.1", "--port", str(federation.control_port)),
            *("--isolation", "process", *secret),
        ],
        **commands,
        "the SuperExec": [
            *(program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{federation.control_port}"),
            *("--root-certificates", authority, *secret),
        ],
        "the gateway": [sys.executable, "-m", "perennial.deploy.gateway", str(folder.path)],
    }, environment
