"""The ClientApp, by the name that Flower loads."""

from perennial.client.app import app as _app

app = _app
