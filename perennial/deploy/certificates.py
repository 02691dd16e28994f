"""The operator's authority and the SuperLink's certificate (X.509), and sites' keys: all ECDSA P-384.

With its node key a SuperNode proves to the SuperLink which site it is.
"""

import datetime
import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file

AUTHORITY_DAYS = 3650
LONGEST_SERVER_DAYS = 825
"""What common TLS clients accept for a server certificate."""
CLOCK_TOLERANCE = datetime.timedelta(hours=1)
"""A certificate is valid from a little before it was made: sites' clocks differ."""


@dataclass(frozen=True)
class Issued:
    """One certificate with its private key, both as PEM bytes."""

    certificate: bytes
    key: bytes


def make_authority(name: str) -> Issued:
    """A new certificate authority for one federation."""
    key, subject = make_node_key(), _make_name(f"{name} authority")
    # key_cert_sign and crl_sign
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    extensions = ((x509.BasicConstraints(ca=True, path_length=0), True), (usage, True), (own, False))
    return _issue(key, subject, key, subject, AUTHORITY_DAYS, extensions)


def make_server(authority: Issued, hosts: Sequence[str], days: int) -> Issued:
    """A certificate for the SuperLink, valid for hosts (names or IP addresses) and for loopback.

    Raises ConfigError when a host is not a name or address, or days is out of range.
    """
    if not 1 <= days <= LONGEST_SERVER_DAYS:
        raise ConfigError(f"days: found {days}, allowed 1 to {LONGEST_SERVER_DAYS}")
    issuer = x509.load_pem_x509_certificate(authority.certificate).subject
    signer = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    names = [parse_general_name(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    extensions = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    )
    return _issue(make_node_key(), _make_name(hosts[0]), signer, issuer, days, extensions)


def _make_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _issue(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    days: int,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
) -> Issued:
    """A certificate of a key. extensions: each with whether it is critical."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_TOLERANCE)
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate = builder.sign(signer, hashes.SHA384()).public_bytes(pem)
    return Issued(certificate, key.private_bytes(pem, form, serialization.NoEncryption()))


def parse_general_name(host: str) -> x509.GeneralName:
    """host as an IP address or a DNS name. Raises ConfigError when it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(
        0 < len(label) <= 63 and label.replace("-", "").isalnum() and label.isascii() for label in labels
    ):
        raise ConfigError(
            f"host: found {host!r}, allowed a DNS name such as fl.example.org, or an IP address"
        )
    return x509.DNSName(host)


@dataclass(frozen=True)
class Validity:
    """Subject, hosts and times of a certificate. fingerprint: SHA-256 as openssl prints it, AA:BB:..."""

    subject: str
    fingerprint: str
    hosts: tuple[str, ...]
    begins: datetime.datetime
    ends: datetime.datetime

    @property
    def days_left(self) -> int:
        """Whole days until the certificate expires; negative if it has expired."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).days

    @property
    def identified(self) -> str:
        """The certificate's validity in words, with its fingerprint."""
        return f"{self}; SHA-256 {self.fingerprint}"

    def __str__(self) -> str:
        state = f"expires {self.ends:%Y-%m-%d}, {self.days_left} days left"
        if self.days_left < 0:
            state = f"EXPIRED on {self.ends:%Y-%m-%d}"
        hosts = f" for {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.subject}{hosts}: {state}"


def read_validity(path: Path) -> list[Validity]:
    """The validity of every certificate in a PEM file.

    Raises StateError naming the file when there is no certificate, or something beside certificates that
    another reader could trust.
    """
    try:
        data = path.read_bytes()
        found = x509.load_pem_x509_certificates(data)
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StateError(f"{path}: holds no PEM certificate: {error}") from error
    if data.count(b"-----BEGIN ") != len(found):
        raise StateError(f"{path}: holds more than certificates; allowed PEM blocks named CERTIFICATE alone")
    return [_read_validity(certificate) for certificate in found]


def write_issued(issued: Issued, certificate: Path, key: Path) -> None:
    """Write certificate and key, each replaced in one step; only the owner can read the key."""
    replace_file(key, issued.key, mode=0o600)
    replace_file(certificate, issued.certificate, mode=0o644)


def make_node_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Write a node's private key in OpenSSH form, for its owner alone, and the public one to path.pub.

    Raises StateError when path exists: a key that a SuperLink knows is not overwritten by accident.
    """
    if path.exists():
        raise StateError(f"{path}: exists already; move it away to make a new key (and register that one)")
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, private, mode=0o600)
    replace_file(path.with_name(f"{path.name}.pub"), encode_public_line(key), mode=0o644)


def encode_public_line(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key as one OpenSSH line."""
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(*openssh) + b"\n"


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key. Raises StateError for a file that is missing, no such key, or open to others."""
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise StateError(
            f"{path}: mode {mode & 0o777:o} lets others read the private key; allowed 600 (chmod 600 {path})"
        )
    try:
        key = serialization.load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"{path}: not an unencrypted OpenSSH private key: {error}") from error
    _require_p384(key, str(path))
    return cast(ec.EllipticCurvePrivateKey, key)


def check_public_line(line: bytes, where: str) -> bytes:
    """A site's public key, as one line. Raises ConfigError when it is not an ECDSA P-384 public key."""
    try:
        key = serialization.load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{where}: not an OpenSSH public key: {error}") from error
    _require_p384(key, where)
    return line.strip() + b"\n"


def compute_fingerprint(public: bytes) -> str:
    """SHA-256 of a public key, in groups of four, for two people to compare on the telephone."""
    digest = hashlib.sha256(b" ".join(public.split()[:2])).hexdigest()[:32]
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def _require_p384(key: object, where: str) -> None:
    if not isinstance(getattr(key, "curve", None), ec.SECP384R1):
        raise ConfigError(f"{where}: found {type(key).__name__}, allowed an ECDSA P-384 key")


def convert_to_pem(public_key: Path) -> bytes:
    """A public key in OpenSSH's form as Flower takes it."""
    key = serialization.load_ssh_public_key(public_key.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)


def _read_validity(certificate: x509.Certificate) -> Validity:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = tuple(str(name.value) for name in names)
    except x509.ExtensionNotFound:
        hosts = ()
    return Validity(
        subject=certificate.subject.rfc4514_string(),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
        hosts=hosts,
        begins=certificate.not_valid_before_utc,
        ends=certificate.not_valid_after_utc,
    )
