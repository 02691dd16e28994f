"""`perennial serve`, as a person types it."""

from pathlib import Path
from typing import Annotated

import typer

from perennial.cli.options import InContainer, MailFile, WebhookFile


def serve(
    runs: Annotated[Path, typer.Argument(help="folder of run folders")] = Path("runs"),
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help="a token with which people may pause, resume and stop; else read-only")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="for TLS")] = None,
    key: Annotated[Path | None, typer.Option(help="of the certificate")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="another name by which browsers ask for these pages; repeat")
    ] = None,
    in_container: InContainer = False,
    webhook_file: WebhookFile = None,
    mail_file: MailFile = None,
    budget: Annotated[
        float | None, typer.Option(help="epsilon of a site in a run; tell when it is nearly spent")
    ] = None,
) -> None:
    """Serve pages that show runs as they happen, and /metrics for Prometheus."""
    from perennial.cli.serve import serve_command

    serve_command(
        *(runs, host, port, token_file, certificate, key, name or []),
        *(in_container, webhook_file, mail_file, budget),
    )
