"""perennial serve and perennial site serve: pages that show runs and steer them."""

from pathlib import Path

import typer
from starlette.types import ASGIApp

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.tokens import made_token, read_token
from perennial.live.guard import Sessions, allowed_hosts, is_loopback
from perennial.live.notices import Notices, Send, read_address, webhook
from perennial.live.operator import OperatorPages
from perennial.live.serving import web_server


def serve_command(
    runs: Path,
    host: str,
    port: int,
    token_file: Path | None,
    certificate: Path | None,
    key: Path | None,
    names: list[str],
    in_container: bool,
    webhook_file: Path | None,
    mail_file: Path | None,
    budget: float | None,
) -> None:
    """Serve the operator's pages until interrupted."""
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
    sessions = Sessions(token, "perennial", secure=secure)
    notices = notices_to(webhook_file, mail_file)
    pages = OperatorPages(runs, sessions, everyone=open_to_all, notices=notices, budget=budget)
    listen(pages.app(allowed_hosts(host, names)), host, port, certificate, key)


def notices_to(webhook_file: Path | None, mail_file: Path | None) -> Notices | None:
    """Notices by the ways that files name; None where none does."""
    sends: list[Send] = []
    if webhook_file is not None:
        sends.append(webhook(read_address(webhook_file)))
    if mail_file is not None:
        from perennial.live.mail import mail, read_mail_settings

        sends.append(mail(read_mail_settings(mail_file)))
    return Notices(sends) if sends else None


def serve_site_command(
    path: Path,
    host: str,
    port: int,
    token_file: Path | None,
    in_container: bool,
    webhook_file: Path | None,
    mail_file: Path | None,
) -> None:
    """Serve a hospital's page until interrupted; everybody has to sign in."""
    from perennial.live.hospital import HospitalPages

    if not is_loopback(host) and not in_container:
        raise ConfigError(f"--host {host}: allowed 127.0.0.1 or ::1; this page is for its own machine alone")
    token_file = token_file or path.absolute().parent / "page.token"
    sessions = Sessions(made_token(token_file), "perennial-site", secure=False)
    typer.echo(f"sign in with the word in {token_file}")
    notices = notices_to(webhook_file, mail_file)
    listen(HospitalPages(path, sessions, notices).app(allowed_hosts(host, [])), host, port)


def listen(
    app: ASGIApp, host: str, port: int, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Answer until interrupted. Raises StateError if the address is taken or not of this machine."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key: give both, or neither")
    scheme = "http" if certificate is None else "https"
    typer.echo(f"pages: {scheme}://{host}:{port}/")
    try:
        web_server(app, host, port, certificate, key).run()
    except OSError as error:
        raise StateError(f"pages: cannot listen on {host}:{port}: {error.strerror or error}") from error
