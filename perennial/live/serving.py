"""The web server that all kinds of pages share."""

import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

MOST_CONNECTIONS = 4096


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening()


def web_server(
    app: ASGIApp,
    host: str,
    port: int,
    listening: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """A web server, not yet started. It logs no request.

    listening: called once the server answers at its address.
    """
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
    return _Server(config, listening)
