"""A deployment of real processes on loopback: a SuperLink with TLS and node keys, and SuperNodes."""

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind((LOOPBACK, 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_certificates(folder: Path) -> None:
    """ca.crt, server.pem and server.key for loopback, valid for a day."""
    now = datetime.datetime.now(datetime.UTC)
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in ("ca", "server")}
    names = {name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in keys}
    for name, key in keys.items():
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        )
        if name == "server":
            hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        certificate = builder.sign(keys["ca"], hashes.SHA384())
        suffix = "crt" if name == "ca" else "pem"
        (folder / f"{name}.{suffix}").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "server.key").write_bytes(pem(keys["server"], form))


def write_node_key(path: Path) -> None:
    """An ECDSA P-384 pair in OpenSSH form: path and path.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(pem(key, serialization.PrivateFormat.OpenSSH))
    path.chmod(0o600)
    public = key.public_key()
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    path.with_suffix(".pub").write_bytes(public.public_bytes(encoding, form))


class Deployment:
    """Everything lives under folder; every process ends with the block. sites: name -> site.yaml."""

    def __init__(self, folder: Path, sites: dict[str, Path]) -> None:
        self.folder, self.sites = folder, sites
        self.fleet, self.control, *self.site_ports = free_ports(2 + len(sites))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def __enter__(self) -> Self:
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        write_certificates(self.folder)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{LOOPBACK}:{self.control}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        self._start(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
            "--disable-runtime-dependency-installation",
            *("--enable-supernode-auth", "--database", "state.db"),
            *("--host", LOOPBACK, "--port", str(self.control)),
            *("--fleet-api-type", "grpc-rere", "--fleet-api-address", f"{LOOPBACK}:{self.fleet}"),
        )
        self._wait_for_port(self.control)
        self._wait_for_port(self.fleet)
        for (name, site_file), port in zip(self.sites.items(), self.site_ports, strict=True):
            key = self.folder / f"{name}.key"
            write_node_key(key)
            self.flwr("supernode", "register", str(key.with_suffix(".pub")), "here", "--name", name)
            self._start(
                name,
                "flower-supernode",
                *("--root-certificates", "ca.crt", "--superlink", f"{LOOPBACK}:{self.fleet}"),
                *("--auth-supernode-private-key", str(key), "--port", str(port)),
                *("--node-config", f'site="{site_file}"'),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()

    def flwr(self, *arguments: str, timeout: float = 240) -> str:
        """Run one flwr command; its output. Raises AssertionError with the output when it fails."""
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"flwr {arguments}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The end of every process's log."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def _wait_for_port(self, port: int) -> None:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(f"nothing listens on port {port}: {self.logs()}")
