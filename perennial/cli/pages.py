"""perennial serve and perennial site serve: read-only pages that show runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.foundation.errors import ConfigError, StateError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Names = Annotated[
    list[str] | None, typer.Option(help="another name by which browsers ask for these pages; repeat")
]
InContainer = Annotated[bool, typer.Option(help="the port is published on the host's loopback alone")]


def serve(
    runs: Annotated[Path, typer.Argument(help="folder of run folders")] = Path("runs"),
    host: Annotated[str, typer.Option(help="address to listen on: loopback")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8080,
    name: Names = None,
    in_container: InContainer = False,
) -> None:
    """Serve read-only pages that show runs as they happen, and /metrics for Prometheus."""
    from perennial.live.operator import OperatorPages
    from perennial.live.web import list_allowed_hosts

    if not runs.is_dir():
        raise ConfigError(f"{runs}: no such folder; name the one that holds the run folders")
    _require_loopback(host, in_container)
    _listen(OperatorPages(runs).app(list_allowed_hosts(host, name or [])), host, port)


def serve_site(
    path: Annotated[Path, typer.Argument(help="site.yaml")] = Path("site.yaml"),
    host: Annotated[str, typer.Option(help="address to listen on: loopback")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8081,
    name: Names = None,
    in_container: InContainer = False,
) -> None:
    """Serve a read-only page for this hospital: what has left, what was approved, what happens now."""
    from perennial.live.hospital import HospitalPages
    from perennial.live.web import list_allowed_hosts

    _require_loopback(host, in_container)
    _listen(HospitalPages(path).app(list_allowed_hosts(host, name or [])), host, port)


def _require_loopback(host: str, in_container: bool) -> None:
    """Raises ConfigError for an address that others reach: these pages sign nobody in."""
    from perennial.live.web import is_loopback

    if not is_loopback(host) and not in_container:
        raise ConfigError(
            f"--host {host}: allowed 127.0.0.1 or ::1. Others reach this address, and these pages sign "
            "nobody in; put a proxy that does before them, and name the proxy's host name with --name"
        )


def _listen(app: "ASGIApp", host: str, port: int) -> None:
    """Answer until interrupted. Raises StateError if the address is taken or not of this machine."""
    from perennial.live.web import make_server

    def tell() -> None:
        typer.echo(f"pages: http://{host}:{port}/")

    try:
        make_server(app, host, port, tell).run()
    except OSError as error:
        raise StateError(f"pages: cannot listen on {host}:{port}: {error.strerror or error}") from error
