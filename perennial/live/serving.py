"""The web server that all kinds of pages share."""

import uvicorn
from starlette.types import ASGIApp

MOST_CONNECTIONS = 4096


def web_server(app: ASGIApp, host: str, port: int) -> uvicorn.Server:
    """A web server, not yet started. It logs no request."""
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
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
