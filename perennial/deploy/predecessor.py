"""Lets a site's SuperNode in at once when an earlier one of this site ended without signing off.

Flower's SuperLink keeps the place of a SuperNode that was killed for a minute, until two heartbeats are
missing, and lets nobody in with the same key meanwhile. The next SuperNode of the same folder on the same
machine knows better: it can take the lock that the earlier one held while it lived. So it signs off for it.
"""

import json
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file, sole_owner

RECORD = "node.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def place(state_dir: Path) -> Path:
    """The folder that a site's SuperNode locks (foundation/files.sole_owner) while it lives."""
    return state_dir / "supernode"


def note_node(state_dir: Path, node: int) -> None:
    """Record Flower's id of the node as which this process is connected. Raises StateError."""
    folder = place(state_dir)
    make_folder(folder)
    replace_file(folder / RECORD, json.dumps({"node": str(node), "here": _here(folder)}).encode())


def left_node(state_dir: Path) -> int | None:
    """Flower's node id of the site's last SuperNode, if that one has certainly ended; None otherwise.

    It may still live if it ran on another machine, before this machine's last start, or in a folder of which
    this one is a copy.
    """
    folder = place(state_dir)
    try:
        record = json.loads((folder / RECORD).read_bytes())
        with sole_owner(folder, "perennial site"):
            return int(record["node"]) if record["here"] and record["here"] == _here(folder) else None
    except (OSError, ValueError, TypeError, KeyError, StateError):
        return None


def _here(folder: Path) -> str:
    """This folder, on this machine, since it was started; '' where the system does not say."""
    try:
        boot, found = BOOT.read_text(encoding="ascii").strip(), folder.stat()
    except OSError:
        return ""
    return f"{boot} {found.st_dev} {found.st_ino}"
