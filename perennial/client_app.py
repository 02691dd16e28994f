"""The ClientApp, by the name that Flower loads.

Flower's simulation imports both apps at the same moment, in two threads. In an app bundle the rooms are found
only once `perennial` is imported to its end, so this module waits for that first.
"""

import perennial  # noqa: F401  # isort: skip
from perennial.client.app import app as _app

app = _app
