"""The operator's SuperLink: its processes, and what the gateway says of it in a file beside the runs.

Flower's own commands run unchanged, in `--isolation process` with a secret, so that no other user of the
machine is given a task. The pages read the file, so they know of the SuperLink when no run goes; its time is
its heartbeat.
"""

import math
import os
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.processes import program, require_flower, supervise, warm
from perennial.foundation.block import Block
from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import SILENT_AFTER, last_beat

STATUS = ".superlink.json"
"""In the folder of all runs."""
LARGEST = 2**24


Name = Annotated[str, StringConstraints(max_length=80)]


class SuperLinkStatus(Block):
    """The state of a SuperLink.

    silent_for: seconds since its last heartbeat, which is the file's time. certificate_ends: when the
    certificate that it serves with expires, in seconds since 1970. sites: of every registered site, None
    while it is connected, else the time since which it is silent; 0 if it was never connected. others:
    `added` or `revoked` of every other site on record. unknown: status by id of Flower's runs that go on and
    that no name here has (deploy/control.py).
    """

    silent_for: float = math.inf
    certificate_ends: float
    sites: dict[Name, float | None] = Field(default_factory=dict)
    others: dict[Name, Name] = Field(default_factory=dict)
    unknown: dict[Name, Name] = Field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.silent_for < SILENT_AFTER


def read_superlink_status(runs: Path) -> SuperLinkStatus | None:
    """The status that the SuperLink wrote into the folder of all runs; None if none can be read."""
    path = runs / STATUS
    silent_for = last_beat(path)
    try:
        if silent_for is None or path.is_symlink() or path.stat().st_size > LARGEST:
            return None
        said = SuperLinkStatus.model_validate_json(path.read_bytes())
        return said.model_copy(update={"silent_for": silent_for})
    except (OSError, ValueError):
        return None


def start_superlink(folder: OperatorFolder) -> None:
    """Become the SuperLink. Raises StateError when the server certificate has expired."""
    require_flower()
    for certificate in read_validity(folder.certificates / "server.pem"):
        if certificate.days_left < 0:
            raise StateError(f"{certificate}; renew it with `perennial deploy rotate`")
    certificates, federation = folder.certificates, folder.federation
    authority = str(certificates / "ca.crt")
    apps, environment, secret = warm(
        folder.state / "process", folder.state / "flower", "flwr-serverapp", "perennial.server.app"
    )
    commands = {
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
        **apps,
        "the SuperExec": [
            *(program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{federation.control_port}"),
            *("--root-certificates", authority, *secret),
        ],
        "the gateway": [sys.executable, "-m", "perennial.deploy.gateway", str(folder.path)],
    }
    os._exit(supervise(commands, environment, lambda: ""))
