"""The ServerApp, by the name that Flower loads."""

from perennial.server.app import app as _app

app = _app
