"""Notices by webhook and e-mail, taken by real servers: what goes out, once, and with what to do."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any

import pytest
import yaml

from perennial.cli.pages import notices_to
from perennial.deploy.certificates import make_authority, make_server, write_issued
from perennial.foundation.errors import ConfigError
from perennial.live.diagnosis import diagnosis
from perennial.live.mail import mail, message_of, read_mail_settings
from perennial.live.notices import Notices, webhook
from perennial.live.run_state import RunState
from perennial.live.spending import Spending
from perennial.server.faults import Fault
from tests.live_pages import going_on, room_for, until
from tests.run_folders import HOSTILE

LOGIN = "operator@example.org", "correct horse"


class Post:
    """A mail server of one person's. taken: (whether by TLS, whether logged in, message)."""

    def __init__(self, context: SSLContext | None) -> None:
        self.taken: list[tuple[bool, bool, Message]] = []
        self._context = context
        self.port = 0

    async def serve(self, began: threading.Event, end: asyncio.Event) -> None:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        began.set()
        async with server:
            await end.wait()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import base64

        secure = proven = False
        writer.write(b"220 here\r\n")
        while line := (await reader.readline()).decode().strip():
            match line.split()[0].upper():
                case "EHLO":
                    writer.write(b"250-here\r\n250-STARTTLS\r\n250 AUTH PLAIN\r\n")
                case "STARTTLS" if self._context is not None:
                    writer.write(b"220 go on\r\n")
                    await writer.start_tls(self._context)
                    secure = True
                case "AUTH":
                    proven = base64.b64decode(line.split()[2]).decode().split("\0")[1:] == list(LOGIN)
                    writer.write(b"235 welcome\r\n" if proven else b"535 no\r\n")
                case "DATA":
                    writer.write(b"354 go on\r\n")
                    content = b""
                    while (part := await reader.readline()) != b".\r\n":
                        content += part
                    self.taken.append((secure, proven, message_from_bytes(content, policy=default)))
                    writer.write(b"250 taken\r\n")
                case "QUIT":
                    writer.write(b"221 bye\r\n")
                    writer.close()
                    return
                case _:
                    writer.write(b"250 fine\r\n")


@contextmanager
def post(context: SSLContext | None = None) -> Iterator[Post]:
    served, began = Post(context), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(served.serve(began, end)), daemon=True)
    thread.start()
    assert began.wait(10)
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)


@contextmanager
def listener(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook's address, and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/a-secret-word", posted
    finally:
        server.shutdown()


def mail_file(folder: Path, **changes: Any) -> Path:
    path = folder / "mail.yaml"
    content = {"server": "localhost", "sender": LOGIN[0], "to": ["night@example.org"], **changes}
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    return path


def test_a_webhook_is_told_of_a_finished_a_silent_and_a_refused_run_and_of_a_spent_budget(
    tmp_path: Path,
) -> None:
    with listener() as (address, posted), room_for(1e12):
        notices = Notices([webhook(address)])
        with going_on(tmp_path) as run:
            state, spending = RunState(run.folder), Spending(run.folder, budget=8.0)

            def look() -> None:
                state.read()
                faults = diagnosis(None, [(state, spending)])
                notices.take("trial", faults, finished=state.status == "finished")

            run.begin_round(1, ["graz", "linz"])
            run.answer("graz", "policy: policy.answers: 'train' is not answered here", refused=True)
            spending.by_site = {"graz": 6.5, "linz": 1.0}
            for _ in range(3):
                look()
        # its heartbeat has ended without a word in the journal
        look()
        run.journal.write("run_finished")
        look()
        until(lambda: len(posted) >= 4, 10)
        time.sleep(0.2)
    kinds = [told["kind"] for told in posted]
    assert sorted(kinds) == ["finished", "policy", "serverapp", "spending"]
    refused = posted[kinds.index("policy")]
    assert refused["run"] == "trial" and "The policy of graz refuses a request." in refused["text"]
    assert refused["remedy"] and refused["remedy"] in refused["text"]
    assert "perennial deploy resume trial" in posted[kinds.index("serverapp")]["remedy"]
    assert "graz has spent four fifths" in posted[kinds.index("spending")]["text"]


def test_a_mail_goes_out_by_tls_after_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_authority("mail")
    write_issued(make_server(authority, ["localhost"], 30), tmp_path / "server.pem", tmp_path / "server.key")
    write_issued(authority, tmp_path / "ca.crt", tmp_path / "ca.key")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with post(context) as served:
        path = mail_file(tmp_path, port=served.port, user=LOGIN[0], password=LOGIN[1])
        notices = notices_to(None, path)
        assert notices is not None
        fault = Fault("budget", "graz")
        notices.take("graz", [fault])
        until(lambda: served.taken, 10)
    ((secure, proven, message),) = served.taken
    assert secure and proven
    assert message["subject"] == f"graz: {fault.cause}"
    assert message["to"] == "night@example.org" and message["auto-submitted"] == "auto-generated"
    assert str(message.get_payload()).split("\r\n") == [fault.cause, "", fault.turn, ""]


def test_a_mail_server_that_cannot_be_trusted_gets_nothing(tmp_path: Path) -> None:
    authority = make_authority("another")
    write_issued(make_server(authority, ["localhost"], 30), tmp_path / "server.pem", tmp_path / "server.key")
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    notice = {"run": "r", "kind": "ended", "text": "t", "remedy": "", "time": 0.0}
    with post(context) as served:
        settings = read_mail_settings(mail_file(tmp_path, port=served.port))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            mail(settings)(notice)
    assert not served.taken


def test_words_of_a_site_make_no_header_of_a_mail(tmp_path: Path) -> None:
    settings = read_mail_settings(mail_file(tmp_path))
    text = f"graz\r\nBcc: everybody@example.org\r\n\r\n{HOSTILE} " + "x" * 300
    message = message_of({"run": "r", "text": text, "remedy": "", "time": 0.0}, settings)
    read = message_from_bytes(message.as_bytes(), policy=default)
    assert read["bcc"] is None and read["to"] == "night@example.org" and len(read["subject"]) < 130


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"security": "none", "server": "mail.example.org"}, "security: none"),
        ({"to": []}, "to"),
        ({"to": ["night"]}, "found 'night'"),
        ({"sender": "a@b.c\nBcc: d@e.f"}, "allowed an address"),
        ({"port": 0}, "port"),
        ({"sever": "x"}, "sever"),
    ],
)
def test_a_mail_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = mail_file(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_mail_settings(path)
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_a_mail_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = mail_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_mail_settings(path)


def test_a_webhook_that_takes_nothing_is_logged_without_its_address_and_keeps_no_mail_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.live.notices.ATTEMPTS", 1)
    settings = {"security": "none", "server": "127.0.0.1"}
    with listener(500) as (address, posted), post() as served:
        word = tmp_path / "webhook"
        word.write_text(address)
        notices = notices_to(word, mail_file(tmp_path, port=served.port, **settings))
        assert notices is not None
        notices.take("graz", [Fault("silent", "graz")])
        until(lambda: posted and served.taken and caplog.records, 10)
    assert "a notice was not taken" in caplog.text and "a-secret-word" not in caplog.text
