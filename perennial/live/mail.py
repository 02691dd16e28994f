"""Sends notices by e-mail, through a server that a file of the operator's or hospital's names."""

import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from perennial.config.yaml_file import read_yaml, validate
from perennial.foundation.block import Block
from perennial.foundation.errors import ConfigError
from perennial.live.guard import is_loopback

SECONDS = 20.0
PORTS = {"starttls": 587, "tls": 465, "none": 25}
LONGEST_SUBJECT = 120
NOT_IN_ADDRESS = set(" ,;<>\"'()")


class MailSettings(Block):
    """The file that `--mail-file` names, readable for its owner alone.

    security: starttls, tls from the first byte, or none, which is for a server of this machine only.
    """

    server: str = Field(min_length=1)
    sender: str
    to: list[str] = Field(min_length=1, max_length=50)
    security: Literal["starttls", "tls", "none"] = "starttls"
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str = ""
    password: str = Field(default="", repr=False)

    @field_validator("sender", "to")
    @classmethod
    def _is_address(cls, value: str | list[str]) -> str | list[str]:
        for address in [value] if isinstance(value, str) else value:
            name, _, domain = address.partition("@")
            if not name or not domain or not address.isprintable() or set(address) & NOT_IN_ADDRESS:
                raise ValueError(f"found {address!r}, allowed an address such as operator@example.org")
        return value

    @model_validator(mode="after")
    def _is_closed(self) -> "MailSettings":
        if self.security == "none" and not is_loopback(self.server):
            raise ValueError("security: none is for a server of this machine (127.0.0.1) alone")
        return self


def read_mail_settings(path: Path) -> MailSettings:
    """Read the settings from a file. Raises ConfigError if others can read it, or naming what is wrong."""
    settings = validate(MailSettings, read_yaml(path), str(path))
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others can read this file; allowed: mode 0600 (chmod 600 {path})")
    return settings


def mail(settings: MailSettings) -> Callable[[dict[str, Any]], None]:
    """A function that sends a notice as an e-mail. It raises OSError when the server does not take it."""

    def send(notice: dict[str, Any]) -> None:
        message = message_of(notice, settings)
        port = settings.port or PORTS[settings.security]
        if settings.security == "tls":
            context = ssl.create_default_context()
            server = smtplib.SMTP_SSL(settings.server, port, timeout=SECONDS, context=context)
        else:
            server = smtplib.SMTP(settings.server, port, timeout=SECONDS)
        with server:
            if settings.security == "starttls":
                server.starttls(context=ssl.create_default_context())
            if settings.user:
                server.login(settings.user, settings.password)
            server.send_message(message)

    return send


def message_of(notice: dict[str, Any], settings: MailSettings) -> EmailMessage:
    """The plain-text e-mail for a notice. Sites' text stands in no header but the subject, on one line."""
    message = EmailMessage()
    subject = " ".join(f"{notice['run']}: {notice['text']}".split())
    message["Subject"] = subject[:LONGEST_SUBJECT] + ("…" if len(subject) > LONGEST_SUBJECT else "")
    message["From"], message["To"] = settings.sender, ", ".join(settings.to)
    message["Date"] = formatdate(notice["time"])
    message["Message-ID"] = make_msgid("perennial", domain=settings.sender.partition("@")[2])
    message["Auto-Submitted"] = "auto-generated"
    said = [notice["text"], notice["remedy"]]
    message.set_content("\n\n".join(text for text in said if text) + "\n")
    return message
