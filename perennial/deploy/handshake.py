"""Tries a TLS handshake with the SuperLink, to say what is wrong before Flower retries in silence."""

import base64
import datetime
import http.client
import os
import socket
import ssl
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perennial.deploy.certificates import read_validity
from perennial.foundation.errors import ConfigError, StateError

EXPIRED, NOT_YET_VALID, WRONG_HOST, WRONG_ADDRESS = 10, 9, 62, 64
"""OpenSSL's verification codes (X509_V_ERR_*)."""
SECONDS = 10
CERTIFICATE_EXPIRED = (
    "the server's certificate has expired; the operator renews it with `perennial deploy rotate`"
)
SET_CLOCK = "; set the clock"


class Unreachable(StateError):
    """Nobody answers at the address, for now."""


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises ConfigError naming what was found."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"superlink: found {address!r}, allowed HOST:PORT, for instance fl.example.org:9092"
        )
    return host.strip("[]"), int(port)


def check_handshake(address: str, authority: Path) -> None:
    """Connect to the SuperLink with TLS, as a SuperNode does, trusting the CA certificate in `authority`.

    address: HOST:PORT. Raises StateError that says what to do; Unreachable if nobody answers.
    """
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    now = datetime.datetime.now(datetime.UTC)
    for certificate in read_validity(authority):
        if now < certificate.begins:
            raise StateError(
                f"{authority}: valid from {certificate.begins:%Y-%m-%d %H:%M} UTC, and this machine's clock "
                f"says {now:%Y-%m-%d %H:%M}{SET_CLOCK}"
            )
    context.load_verify_locations(cafile=authority)
    try:
        with (
            _connected(host, port) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise StateError(f"{address}: {_advice(error, host, authority)}") from error
    except ssl.SSLError as error:
        raise StateError(
            f"{address}: answers, but not with TLS ({error.reason}); is it the SuperLink's Fleet port?"
        ) from error
    except socket.gaierror as error:
        raise Unreachable(
            f"{address}: the name {host!r} is not known here; check DNS or the address"
        ) from error
    except OSError as error:
        raise Unreachable(
            f"{address}: no connection{' through ' + proxy if (proxy := _proxy_for(host)) else ''} "
            f"({error.strerror or error}); see that the SuperLink runs and the firewall lets port {port} out."
        ) from error


def _proxy_for(host: str) -> str:
    """URL of the HTTP proxy by which gRPC would reach a host; '' for none."""
    # gRPC reads these names in lower case alone
    excluded = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")  # noqa: SIM112
    if any(host.endswith(entry.strip()) for entry in excluded.split(",") if entry.strip()):
        return ""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    return next((found for name in names if (found := os.environ.get(name))), "")


def _connected(host: str, port: int) -> socket.socket:
    """A connection to a host, by CONNECT through the proxy where there is one. Raises OSError."""
    proxy = urlsplit(_proxy_for(host))
    if not proxy.hostname:
        return socket.create_connection((host, port), timeout=SECONDS)
    headers = {}
    if proxy.username is not None:
        login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    tunnel = http.client.HTTPConnection(proxy.hostname, proxy.port or 80, timeout=SECONDS)
    tunnel.set_tunnel(host, port, headers)
    tunnel.connect()
    return tunnel.sock


def _advice(error: ssl.SSLCertVerificationError, host: str, authority: Path) -> str:
    if error.verify_code == EXPIRED:
        return CERTIFICATE_EXPIRED
    if error.verify_code == NOT_YET_VALID:
        return f"the server's certificate is not valid yet by this machine's clock{SET_CLOCK}"
    if error.verify_code in (WRONG_HOST, WRONG_ADDRESS):
        return (
            f"the server's certificate is not for {host!r} ({error.verify_message}); use the name that the "
            "operator gave, or ask for `perennial deploy rotate --host` with this one"
        )
    return (
        f"the server's certificate is not signed by the authority in {authority} ({error.verify_message}); "
        "ask the operator for the current ca.crt, and compare its fingerprint by telephone. A proxy that "
        "opens TLS shows a certificate of its own: then your IT lets this address through unopened"
    )
