"""The ClientApp of a site is Perennial's own, and nothing of an app that arrives is unpacked or imported.

Flower unpacks an app into a folder that the app itself names, and imports from there what it names. A
read-only `flower/apps` does not end that: a version such as `0.2.0/../../../state/x` leaves the folder.
"""

import hashlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from flwr.clientapp import ClientApp

from perennial.client.app import app
from perennial.config.approval import read_approvals
from perennial.foundation.errors import NOT_APPROVED, PolicyRefusal, StateError

FLOWERS = "flwr.supernode.runtime.run_clientapp"
"""The module of flwr-clientapp."""


def pin_client_app(approvals: Path) -> None:
    """Put a check of an app's bytes in the place of Flower's unpacking, in this process and its forks.

    Args:
        approvals: folder of the records that `perennial site approve` writes.

    Raises:
        StateError: when the installed Flower unpacks or loads an app by other names.
    """

    def require_approved(fab_file: bytes, skip_prompt: bool) -> None:
        digest = hashlib.sha256(fab_file).hexdigest()
        if all(record.bundle != digest for record in read_approvals(approvals)):
            raise PolicyRefusal(f"{NOT_APPROVED}: {digest}")

    def choose_own(
        default_app_ref: str, app_path: str | None, multi_app: bool
    ) -> Callable[[str, str, str], ClientApp]:
        return lambda fab_id, fab_version, fab_hash: app

    module = import_module(FLOWERS)
    for name, ours in (("install_from_fab", require_approved), ("get_load_client_app_fn", choose_own)):
        if not hasattr(module, name):
            raise StateError(f"{FLOWERS}.{name}: missing in the installed flwr, so apps could not be pinned")
        setattr(module, name, ours)
