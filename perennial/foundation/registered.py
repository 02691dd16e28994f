"""The record of registered sites, which `perennial deploy` writes and the server reads."""

import json
from collections.abc import Mapping
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

NODES = "sites/nodes.json"
"""In the operator's folder, where the operator may write and the server may read."""


def write_registered(path: Path, names: Mapping[str, str]) -> None:
    """Replace the record. names: site name by Flower's id of the node that proved its key, as text."""
    replace_file(path, json.dumps(dict(sorted(names.items())), indent=1).encode(), mode=0o644)


def registered_names(path: Path) -> dict[str, str]:
    """Site name by node id. Raises StateError when the record is missing or damaged."""
    try:
        names = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: the record of registered sites cannot be read ({error})") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StateError(f"{path}: damaged; `perennial deploy add-site` or `revoke` writes it again")
    return names
