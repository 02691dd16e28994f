"""Certificates that work and certificates that say what is wrong with them, over real handshakes."""

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from perennial.deploy import certificates
from perennial.deploy.certificates import (
    Issued,
    make_authority,
    make_node_key,
    make_server,
    read_validity,
    write_issued,
)
from perennial.deploy.federation import Federation, create_operator_folder
from perennial.deploy.handshake import Unreachable, check_admission, split_address
from perennial.foundation.errors import ConfigError, StateError
from tests.deploy.connect_proxy import connect_proxy

KEY = make_node_key()


def check_handshake(address: str, authority: Path) -> None:
    """As a site with some key, at something that lets all in."""
    check_admission(address, authority, KEY)


@contextmanager
def serving(folder: Path, issued: Issued) -> Iterator[str]:
    """A TLS server with a certificate, on loopback; its port as localhost:PORT."""
    write_issued(issued, folder / "server.pem", folder / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listener = socket.create_server(("", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) as talk:
                    talk.recv(4096)
                    talk.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfree")
            except OSError:
                connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture
def authority(tmp_path: Path) -> Issued:
    issued = make_authority("test")
    write_issued(issued, tmp_path / "ca.crt", tmp_path / "ca.key")
    return issued


def test_a_right_certificate_passes_and_tells_its_end(tmp_path: Path, authority: Issued) -> None:
    with serving(tmp_path, make_server(authority, ["fl.example.org", "10.1.2.3"], 30)) as address:
        check_handshake(address, tmp_path / "ca.crt")
    (found,) = read_validity(tmp_path / "server.pem")
    assert found.hosts == ("fl.example.org", "10.1.2.3", "localhost", "127.0.0.1")
    assert found.days_left == 29 and "29 days left" in str(found)
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600


def test_an_expired_certificate_names_rotate(
    tmp_path: Path, authority: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FrozenOutputs(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime(2020, 1, 1, tzinfo=tz)

    with monkeypatch.context() as patch:
        patch.setattr(certificates.datetime, "datetime", FrozenOutputs)
        old = make_server(authority, ["localhost"], 30)
    with serving(tmp_path, old) as address, pytest.raises(StateError, match="expired.*rotate"):
        check_handshake(address, tmp_path / "ca.crt")
    assert "EXPIRED on 2020-01-31" in str(read_validity(tmp_path / "server.pem")[0])


def test_an_authority_from_the_future_blames_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Future(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime(2120, 1, 1, tzinfo=tz)

    with monkeypatch.context() as patch:
        patch.setattr(certificates.datetime, "datetime", Future)
        write_issued(make_authority("future"), tmp_path / "ca.crt", tmp_path / "ca.key")
    with pytest.raises(StateError, match="set the clock"):
        check_handshake("localhost:1", tmp_path / "ca.crt")


def test_a_wrong_name_names_the_name(tmp_path: Path, authority: Issued) -> None:
    with serving(tmp_path, make_server(authority, ["fl.example.org"], 30)) as address:
        port = split_address(address)[1]
        with pytest.raises(StateError, match=r"not for '127\.0\.0\.2'.*rotate --host"):
            check_handshake(f"127.0.0.2:{port}", tmp_path / "ca.crt")


def test_another_authority_is_named(tmp_path: Path, authority: Issued) -> None:
    other = make_authority("other")
    with serving(tmp_path, make_server(other, ["localhost"], 30)) as address:
        with pytest.raises(StateError, match=r"not signed by the authority in .*ca\.crt"):
            check_handshake(address, tmp_path / "ca.crt")
        # while an authority is being changed, sites trust both
        (tmp_path / "ca.crt").write_bytes(authority.certificate + other.certificate)
        check_handshake(address, tmp_path / "ca.crt")


def test_a_change_of_authority_ends(tmp_path: Path) -> None:
    """The key of an authority that was changed because it was stolen opens nothing."""
    federation = Federation(name="test", hosts=("localhost",), runtime="process")
    folder = create_operator_folder(tmp_path / "federation", federation, 30)
    trusted = folder.certificates / "ca.crt"
    stolen = Issued(folder.authority_certificate.read_bytes(), folder.authority_key.read_bytes())
    folder.renew_server(30)
    assert trusted.read_bytes() == stolen.certificate
    with pytest.raises(ConfigError, match="days"):
        folder.renew_server(0, new_authority=True)
    assert folder.authority_certificate.read_bytes() == stolen.certificate, "nothing was changed"
    folder.renew_server(30, new_authority=True)
    (present,) = read_validity(folder.authority_certificate)
    assert read_validity(trusted) == [present]
    false = make_server(stolen, ["localhost"], 30)
    with serving(tmp_path, false) as address, pytest.raises(StateError, match="not signed by the authority"):
        check_handshake(address, trusted)
    new = Issued(folder.authority_certificate.read_bytes(), folder.authority_key.read_bytes())
    with serving(tmp_path, make_server(new, ["localhost"], 30)) as address:
        check_handshake(address, trusted)


def test_every_authority_that_is_trusted_is_named_with_its_fingerprint(
    tmp_path: Path, authority: Issued
) -> None:
    other, both = make_authority("other"), tmp_path / "both.crt"
    both.write_bytes(authority.certificate + other.certificate)
    expected = [
        x509.load_pem_x509_certificate(issued.certificate).fingerprint(hashes.SHA256()).hex(":").upper()
        for issued in (authority, other)
    ]
    assert [found.fingerprint for found in read_validity(both)] == expected
    assert [found.identified.split("SHA-256 ")[1] for found in read_validity(both)] == expected
    # a block that this reader skips and OpenSSL trusts
    hidden = other.certificate.replace(b" CERTIFICATE-", b" TRUSTED CERTIFICATE-")
    both.write_bytes(authority.certificate + hidden)
    with pytest.raises(StateError, match="holds more than certificates"):
        read_validity(both)


def test_nobody_there_and_no_tls_are_different_troubles(tmp_path: Path, authority: Issued) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(64)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(StateError, match="not with TLS"):
            check_handshake(f"localhost:{port}", tmp_path / "ca.crt")
        thread.join(5)

        def cut() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        with pytest.raises(Unreachable, match="no connection"):
            check_handshake(f"localhost:{port}", tmp_path / "ca.crt")
        thread.join(5)
    with pytest.raises(Unreachable, match=f"firewall lets port {port} out"):
        check_handshake(f"localhost:{port}", tmp_path / "ca.crt")
    with pytest.raises(Unreachable, match="not known here"):
        check_handshake("no-such-host.invalid:9092", tmp_path / "ca.crt")


@pytest.mark.parametrize("found", ["fl.example.org", "fl.example.org:", "fl:99999", ":9092", "fl:9a"])
def test_an_address_without_host_or_port_is_refused(found: str) -> None:
    with pytest.raises(ConfigError, match="allowed HOST:PORT"):
        split_address(found)


@pytest.mark.parametrize("host", ["", "fl example", "über.example", "a" * 64 + ".org", "fl..org"])
def test_a_host_that_is_none_is_refused(authority: Issued, host: str) -> None:
    with pytest.raises(ConfigError, match="host: found"):
        make_server(authority, [host], 30)


@pytest.mark.parametrize("days", [0, -1, 826])
def test_days_out_of_range_are_refused(authority: Issued, days: int) -> None:
    with pytest.raises(ConfigError, match="allowed 1 to 825"):
        make_server(authority, ["localhost"], days)


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    with pytest.raises(StateError, match=r"ca\.crt: cannot be read"):
        read_validity(path)
    path.write_text("not PEM")
    with pytest.raises(StateError, match=r"ca\.crt: holds no PEM certificate"):
        read_validity(path)


def test_the_handshake_goes_by_the_proxy_that_flower_would_take(
    tmp_path: Path, authority: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(authority, ["localhost"], 30)
    with serving(tmp_path, server) as address, connect_proxy() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        check_handshake(address, tmp_path / "ca.crt")
        assert proxy.asked == [address]
        monkeypatch.setenv("no_proxy", "example.org,localhost")
        check_handshake(address, tmp_path / "ca.crt")
        assert proxy.asked == [address]
    monkeypatch.delenv("no_proxy")
    with pytest.raises(Unreachable, match=rf"no connection through {proxy.url}"):
        check_handshake(address, tmp_path / "ca.crt")


def test_a_proxy_that_opens_tls_is_named_as_a_cause(
    tmp_path: Path, authority: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proxy").mkdir()
    opened = make_server(make_authority("inspection"), ["localhost"], 30)
    with (
        serving(tmp_path / "proxy", opened) as inside,
        connect_proxy(("localhost", int(inside.rpartition(":")[2]))) as proxy,
    ):
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(StateError, match="not signed by the authority.*proxy that opens TLS"):
            check_handshake("localhost:9092", tmp_path / "ca.crt")
