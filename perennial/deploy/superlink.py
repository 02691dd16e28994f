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

from perennial.deploy.app_container import Half, Partner
from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.processes import Runtime, find_program, require_flower, run_supervised
from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import SILENT_AFTER, last_beat
from perennial.foundation.plain import Block

STATUS = ".superlink.json"
"""In the folder of all runs."""
LARGEST = 2**24


Name = Annotated[str, StringConstraints(max_length=80)]


class SuperLinkStatus(Block):
    """The state of a SuperLink.

    silent_for: seconds since its last heartbeat, which is the file's time. certificate_ends: when the
    certificate that it serves with expires, in seconds since 1970. certificate_waits: whether a newer one is
    in its file. sites: of every registered site, None while it is connected, else the time since which it is
    silent; 0 if it was never connected. others: `added` or `revoked` of every other site on record. unknown:
    status by id of Flower's runs that go on and that no name here has (deploy/control.py).
    """

    silent_for: float = math.inf
    certificate_ends: float
    certificate_waits: bool = False
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


def start_superlink(folder: OperatorFolder, half: Half | None = None) -> None:
    """Become the SuperLink, its gateway and what runs ServerApps; or one half of them, in its own container.

    Raises StateError when the server certificate has expired, or the half that runs apps can read its key.
    """
    require_flower()
    certificates, port = folder.certificates, folder.federation.control_port
    authority = str(certificates / "ca.crt")
    runtime = Runtime(
        folder.state / "process", folder.state / "flower", port, ("--root-certificates", authority)
    )
    apps = runtime.app("flwr-serverapp", "perennial.server.app") if half != Half.KEYS else {}
    if half == Half.APP:
        if (certificates / "server.key").exists():
            raise StateError(
                f"{certificates}/server.key: is in the container that runs apps, and must not be"
            )
        partner = Partner.join(runtime.folder, port)
        os._exit(run_supervised(apps, runtime.environment, lambda: "", partner=partner))
    for certificate in read_validity(certificates / "server.pem"):
        if certificate.days_left < 0:
            raise StateError(f"{certificate}; renew it with `perennial deploy rotate`")
    runtime.make_secret()
    commands = {
        # Control, Runtime and Fleet API share a port, and the first asks nobody who he is: loopback alone
        "the SuperLink": [
            *(find_program("flower-superlink"), "--ssl-ca-certfile", authority),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(folder.state / "superlink.db")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--isolation", "process", *runtime.secret),
        ],
        **apps,
        "the gateway": [sys.executable, "-m", "perennial.deploy.gateway", str(folder.path)],
    }
    lent = None if half is None else Partner.let_in(runtime.folder, port)
    os._exit(run_supervised(commands, runtime.environment, lambda: "", partner=lent))
