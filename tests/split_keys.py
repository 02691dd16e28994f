"""Simulating the sites of a deployed run: divided by the key that its server drew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from perennial.data import federation
from perennial.server.checkpoint import load_checkpoint
from perennial.server.run_folder import CHECKPOINT


@contextmanager
def split_key_of(run: Path) -> Iterator[None]:
    """Inside, simulated data are divided by the key of the run in a folder."""
    checkpoint, _ = load_checkpoint(run / CHECKPOINT)
    key = bytes.fromhex(checkpoint.progress.split_key)
    with patch.object(federation, "derive_simulation_key", lambda seed: key):
        yield
