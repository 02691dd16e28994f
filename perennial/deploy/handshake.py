"""Whether the operator's gateway lets this site in, and if not, why, before Flower retries in silence."""

import base64
import datetime
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from perennial.deploy.certificates import read_validity
from perennial.foundation.errors import ConfigError, StateError, clean_text

EXPIRED, NOT_YET_VALID, WRONG_HOST, WRONG_ADDRESS = 10, 9, 62, 64
"""OpenSSL's verification codes (X509_V_ERR_*)."""
SECONDS = 10
CERTIFICATE_EXPIRED = (
    "the server's certificate has expired; the operator renews it with `perennial deploy rotate`"
)
SET_CLOCK = "; set the clock"
UNREGISTERED = (
    "this site's key is not registered at the SuperLink; send the operator node.key.pub, for `perennial "
    "deploy add-site`"
)
REVOKED = (
    "the operator has revoked this site's key, which cannot be registered again; to come back, make a new "
    "one with `perennial site open` (node.key moved away) and send the operator node.key.pub"
)
CONNECTED = (
    "another SuperNode is connected with this key: either this site's own, which ended less than a minute "
    "ago (wait so long), or one on another machine (stop it; each site needs a key of its own). If you know "
    "of none, the key was copied: ask the operator to revoke it"
)
CLOCK = "this machine's clock and the SuperLink's differ; set the clock"
REASONS = (UNREGISTERED, REVOKED, CONNECTED, CLOCK)
"""Why a site is not let in, with the remedy: the same words at the gateway and at the site."""


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


def sign_headers(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
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
    """Connect to the operator's gateway as a SuperNode does, and prove that this site holds its key.

    Args:
        address: HOST:PORT of the gateway.
        authority: file with the certificate that signed the gateway's.
        key: of this site.
        connected: whether this site's own SuperNode runs, so that one is expected to be connected.

    Raises:
        Unreachable: nobody answers within SECONDS.
        StateError: the site would not be let in; it says why, and what to do.
    """
    split_address(address)
    now = datetime.datetime.now(datetime.UTC)
    for certificate in read_validity(authority):
        if now < certificate.begins:
            raise StateError(
                f"{authority}: valid from {certificate.begins:%Y-%m-%d %H:%M} UTC, and this machine's clock "
                f"says {now:%Y-%m-%d %H:%M}{SET_CLOCK}"
            )
    request = urllib.request.Request(f"https://{address}/admission", b"", sign_headers(key), method="POST")
    context = ssl.create_default_context(cafile=authority)
    # by the proxy that the environment names
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=SECONDS) as reply:
            taken = reply.read(100) == b"connected"
    except urllib.error.HTTPError as refusal:
        said = refusal.read(4096).decode(errors="replace").strip()
        if said not in REASONS:
            said = f"does not check this site's key as a gateway of Perennial does: {clean_text(said, 300)}"
        raise StateError(f"{address}: {said}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _explain(reason, address, authority) from error
    if taken and not connected:
        raise StateError(f"{address}: {CONNECTED}")


def _explain(reason: object, address: str, authority: Path) -> StateError:
    """Why there was no answer, and what to do."""
    host, port = split_address(address)
    match reason:
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=said):
            return StateError(f"{address}: {_advise(code, said, host, authority)}")
        case ssl.SSLError() if not isinstance(reason, ssl.SSLEOFError):  # cut, by whatever lies between
            return StateError(
                f"{address}: answers, but not with TLS ({reason.reason}); is it the SuperLink's Fleet port?"
            )
        case socket.gaierror():
            return Unreachable(f"{address}: the name {host!r} is not known here; check DNS or the address")
    proxy = "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https", "")
    return Unreachable(
        f"{address}: no connection{' through ' + proxy if proxy else ''} "
        f"({clean_text(str(reason), 300)}); see "
        f"that the SuperLink runs and the firewall lets port {port} out."
    )


def _advise(code: int, said: str, host: str, authority: Path) -> str:
    if code == EXPIRED:
        return CERTIFICATE_EXPIRED
    if code == NOT_YET_VALID:
        return f"the server's certificate is not valid yet by this machine's clock{SET_CLOCK}"
    if code in (WRONG_HOST, WRONG_ADDRESS):
        return (
            f"the server's certificate is not for {host!r} ({said}); use the name that the operator gave, or "
            "ask for `perennial deploy rotate --host` with this one"
        )
    return (
        f"the server's certificate is not signed by the authority in {authority} ({said}); ask the operator "
        "for the current ca.crt, and compare its fingerprint by telephone. A proxy that opens TLS shows a "
        "certificate of its own: then your IT lets this address through unopened"
    )
