"""The ServerApp, by the name that Flower loads."""

from perennial.foundation.installation import require_own_package

require_own_package()

from perennial.server.app import app as _app  # noqa: E402

app = _app
