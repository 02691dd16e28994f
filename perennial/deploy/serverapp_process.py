"""Flower's `flwr-serverapp`, run as a script and free of imports of Perennial, like deploy/fork_server.py.

A site announces its reply before it hands over the parts. Flower 1.39 then asks for a part that is not there
yet after a second, and keeps the replies of other sites waiting meanwhile; here it asks sooner.
"""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

FIRST_WAIT = 0.05
"""Seconds until a part is asked for again; then twice as many."""


def main() -> None:
    """Be `flwr-serverapp`."""
    seam: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("flower_seam.py")))
    grid = seam["__getattr__"]("http_grid")
    grid.pull_objects = partial(grid.pull_objects, initial_backoff=FIRST_WAIT)
    seam["plain_logs"]()
    seam["__getattr__"]("flwr_serverapp")()


if __name__ == "__main__":
    main()
