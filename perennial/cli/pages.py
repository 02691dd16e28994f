"""perennial serve and perennial site serve: pages that show runs and steer them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.foundation.errors import ConfigError, StateError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from perennial.live.notices import Notices

Token = Annotated[
    Path | None, typer.Option(help="a token with which people may pause, resume and stop; else read-only")
]
SiteToken = Annotated[
    Path | None, typer.Option(help="token to sign in with; default: page.token beside site.yaml")
]
Names = Annotated[
    list[str] | None, typer.Option(help="another name by which browsers ask for these pages; repeat")
]
InContainer = Annotated[bool, typer.Option(help="the port is published on the host's loopback alone")]
WebhookFile = Annotated[Path | None, typer.Option(help="file with the address to tell what needs somebody")]
MailFile = Annotated[Path | None, typer.Option(help="file that says how to send the same by e-mail")]
Budget = Annotated[
    float | None, typer.Option(help="epsilon of a site in a run; tell when it is nearly spent")
]


def serve(
    runs: Annotated[Path, typer.Argument(help="folder of run folders")] = Path("runs"),
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8080,
    token_file: Token = None,
    certificate: Annotated[Path | None, typer.Option(help="for TLS")] = None,
    key: Annotated[Path | None, typer.Option(help="of the certificate")] = None,
    name: Names = None,
    in_container: InContainer = False,
    webhook_file: WebhookFile = None,
    mail_file: MailFile = None,
    budget: Budget = None,
) -> None:
    """Serve pages that show runs as they happen, and /metrics for Prometheus."""
    from perennial.foundation.tokens import read_token
    from perennial.live.guard import Sessions, allowed_hosts, is_loopback
    from perennial.live.operator import OperatorPages

    if not runs.is_dir():
        raise ConfigError(f"{runs}: no such folder; name the one that holds the run folders")
    secure = certificate is not None
    open_to_all = is_loopback(host) or in_container
    if not open_to_all and (not secure or token_file is None):
        raise ConfigError(
            f"--host {host}: others reach this address, so the pages need --certificate, --key and "
            "--token-file; allowed without: 127.0.0.1 or ::1, which only this machine reaches"
        )
    token = None if token_file is None else read_token(token_file)
    sessions, notices = Sessions(token, "perennial", secure=secure), notices_to(webhook_file, mail_file)
    pages = OperatorPages(runs, sessions, everyone=open_to_all, notices=notices, budget=budget)
    _listen(pages.app(allowed_hosts(host, name or [])), host, port, certificate, key)


def serve_site(
    path: Annotated[Path, typer.Argument(help="site.yaml")] = Path("site.yaml"),
    host: Annotated[str, typer.Option(help="address to listen on: loopback")] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8081,
    token_file: SiteToken = None,
    in_container: InContainer = False,
    webhook_file: WebhookFile = None,
    mail_file: MailFile = None,
) -> None:
    """Serve a page for this hospital: what has left, what was approved, what happens now."""
    from perennial.foundation.tokens import made_token
    from perennial.live.guard import Sessions, allowed_hosts, is_loopback
    from perennial.live.hospital import HospitalPages

    if not is_loopback(host) and not in_container:
        raise ConfigError(f"--host {host}: allowed 127.0.0.1 or ::1; this page is for its own machine alone")
    token_file = token_file or path.absolute().parent / "page.token"
    sessions = Sessions(made_token(token_file), "perennial-site", secure=False)
    typer.echo(f"sign in with the word in {token_file}")
    pages = HospitalPages(path, sessions, notices_to(webhook_file, mail_file))
    _listen(pages.app(allowed_hosts(host, [])), host, port)


def notices_to(webhook_file: Path | None, mail_file: Path | None) -> "Notices | None":
    """A sender of notices to the webhook and the mail address in these files; None without any file."""
    from perennial.live.mail import mail, read_mail_settings
    from perennial.live.notices import Notices, Send, read_address, webhook

    sends: list[Send] = []
    if webhook_file is not None:
        sends.append(webhook(read_address(webhook_file)))
    if mail_file is not None:
        sends.append(mail(read_mail_settings(mail_file)))
    return Notices(sends) if sends else None


def _listen(
    app: "ASGIApp", host: str, port: int, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Answer until interrupted. Raises StateError if the address is taken or not of this machine."""
    from perennial.live.serving import web_server

    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key: give both, or neither")
    scheme = "http" if certificate is None else "https"

    def tell() -> None:
        typer.echo(f"pages: {scheme}://{host}:{port}/")

    try:
        web_server(app, host, port, certificate, key, tell).run()
    except OSError as error:
        raise StateError(f"pages: cannot listen on {host}:{port}: {error.strerror or error}") from error
