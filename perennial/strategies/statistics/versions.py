"""Files of the heads that an asynchronous run used one after the other, as more sums came."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.tensor_file import pieces

FOLDER = "versions"
"""Of a run."""


def keep_version(folder: Path, round_number: int, head: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    """Write one version, whole or not at all. folder: the run's. facts: JSON-able."""
    make_folder(folder / FOLDER)
    replace_file(version_path(folder, round_number), pieces(head, {"facts": json.dumps(facts)}))


def version_path(folder: Path, round_number: int) -> Path:
    """Path of the file with one version's head. folder: the run's."""
    return folder / FOLDER / f"round-{round_number:06d}.safetensors"


def version_facts(path: Path) -> dict[str, Any]:
    """Read the facts that were stored with a version's head."""
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get("facts", "{}"))
