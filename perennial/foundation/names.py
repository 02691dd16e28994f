"""What sites and runs may be called, wherever a name comes from: a file, a column, a message, a person."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

SITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""In site.yaml and in the operator's folder, where a person chooses the name."""
LONGEST = 64
SITE_NAME_RULE = (
    f"1 to {LONGEST} printable characters that begin with a letter or digit, without slash or backslash"
)


def is_site_name(name: str) -> bool:
    """Whether a name that data or a message gives can be shown, logged and used as a folder's name.

    Wider than SITE_NAME, because data that name their own sites know places like `Köln Süd`.
    """
    return (
        1 <= len(name) <= LONGEST
        and name.isprintable()
        and name[0].isalnum()
        and not {"/", "\\"}.intersection(name)
    )


LONGEST_RUN = 227
"""Bytes: of the 255 that the name of a file may have, those of files beside a run's folder take 28 more."""
RUN_NAME_RULE = f"1 to {LONGEST_RUN} bytes of printable characters, without slash, that begin with no dot"


def is_run_name(name: str) -> bool:
    """Whether a run's folder, and files beside it, can have this name."""
    return (
        Path(name).name == name
        and not name.startswith(".")
        and name.isprintable()
        and 1 <= len(os.fsencode(name)) <= LONGEST_RUN
    )


NODES = "sites/nodes.json"
"""In the operator's folder, where the operator may write and the server may read."""


def write_registered(path: Path, names: Mapping[str, str]) -> None:
    """Replace the record. names: site name by Flower's id of the node that proved its key, as text."""
    replace_file(path, json.dumps(dict(sorted(names.items())), indent=1).encode(), mode=0o644)


def read_registered(path: Path) -> dict[str, str]:
    """Site name by node id. Raises StateError when the record is missing or damaged."""
    try:
        names = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: the record of registered sites cannot be read ({error})") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StateError(f"{path}: damaged; `perennial deploy add-site` or `revoke` writes it again")
    return names
