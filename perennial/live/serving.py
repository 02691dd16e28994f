"""The web server that all kinds of pages share."""

from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

MOST_CONNECTIONS = 4096


def web_server(
    app: ASGIApp, host: str, port: int, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    """A web server, not yet started. It logs no request: addresses and forms may hold secrets."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
