"""Every head that an asynchronous run solved for, in a file of its own: what was in use until more came."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from perennial.foundation.files import make_folder, replace_file

FOLDER = "versions"
"""Of a run."""


def keep_version(folder: Path, round_number: int, head: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    """Write one version, whole or not at all. folder: the run's. facts: JSON-able."""
    make_folder(folder / FOLDER)
    tensors = {name: tensor.contiguous() for name, tensor in head.items()}
    path = folder / FOLDER / f"round-{round_number:06d}.safetensors"
    replace_file(path, save(tensors, {"facts": json.dumps(facts)}))
