"""The operator's long-lived process, Flower's SuperLink, and its control by the `flwr` command."""

import json
import os
import subprocess
import sys
from pathlib import Path

from perennial.deploy import stock
from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import IN_CONTAINER, OperatorFolder
from perennial.deploy.processes import supervise
from perennial.foundation.errors import StateError
from perennial.foundation.plain import PlainObject

CONNECTION = "federation"
"""Name of the connection in Flower's config.toml."""


def superlink_command(folder: OperatorFolder) -> list[str]:
    """The command line of the SuperLink. The Control API listens on loopback alone."""
    certificates, state = folder.certificates, folder.state
    return [
        *(sys.executable, "-m", "perennial.deploy.superlink_process", str(folder.path)),
        *("--ssl-ca-certfile", str(certificates / "ca.crt")),
        *("--ssl-certfile", str(certificates / "server.pem")),
        *("--ssl-keyfile", str(certificates / "server.key")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--database", str(state / "superlink.db")),
        *("--host", "127.0.0.1", "--port", str(folder.federation.control_port)),
        *("--fleet-api-type", "grpc-rere"),
        *("--fleet-api-address", f"{folder.federation.fleet_host}:{folder.federation.fleet_port}"),
        *("--health-server-address", f"{folder.federation.health_host}:{folder.federation.health_port}"),
    ]


def start_superlink(folder: OperatorFolder) -> None:
    """Become the SuperLink. Raises StateError when the server certificate has expired."""
    for certificate in read_validity(folder.certificates / "server.pem"):
        if certificate.days_left < 0:
            raise StateError(f"{certificate}; renew it with `perennial deploy rotate`")
    folder.derive_settings()
    if stock.speaks_http():
        os._exit(supervise(*stock.superlink_processes(folder), lambda: ""))
    command = superlink_command(folder)
    os.execve(command[0], command, superlink_environment(folder))


def superlink_environment(folder: OperatorFolder) -> dict[str, str]:
    """Environment variables for the SuperLink and for Flower's commands beside it."""
    binaries = str(Path(sys.executable).parent)
    return os.environ | {
        "FLWR_HOME": str(folder.state / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def flwr(folder: OperatorFolder, *arguments: str) -> str:
    """Run one `flwr` command against the federation's Control API; returns its standard output.

    Raises StateError with the command's output when it fails.
    """
    done = subprocess.run(
        _flwr_command(folder, arguments),
        cwd=folder.path,
        env=superlink_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise StateError(f"flwr {' '.join(arguments[:2])}: failed: {said or 'no output'}")
    return done.stdout


def flwr_json(folder: OperatorFolder, *arguments: str) -> PlainObject:
    """Run one `flwr` command with `--format json`, as flwr() does; returns the parsed answer.

    Raises StateError when the command fails, its answer is no JSON, or the answer reports a failure.
    """
    output = flwr(folder, *arguments, "--format", "json")
    start = output.find("{")
    try:
        answer = json.loads(output[start:])
    except ValueError as error:
        raise StateError(
            f"flwr {' '.join(arguments[:2])}: answer not understood: {output.strip()}"
        ) from error
    if not answer.get("success", False):
        raise StateError(f"flwr {' '.join(arguments[:2])}: {answer.get('error-message') or output.strip()}")
    return answer


def follow(folder: OperatorFolder, *arguments: str) -> int:
    """Run one `flwr` command with its output on the terminal; returns its exit status."""
    command = _flwr_command(folder, arguments)
    return subprocess.run(command, cwd=folder.path, env=superlink_environment(folder), check=False).returncode


def _flwr_command(folder: OperatorFolder, arguments: tuple[str, ...]) -> list[str]:
    folder.derive_settings()
    inside = folder.path == IN_CONTAINER
    if folder.federation.runtime == "compose" and not inside:
        compose = ["docker", "compose", "--project-directory", str(folder.path)]
        return [*compose, "exec", "-T", "superlink", "flwr", *arguments]
    return [str(Path(sys.executable).with_name("flwr")), *arguments]
