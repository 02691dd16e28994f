"""How `perennial run` imports what it needs: half of a short run is imports."""

from collections.abc import Callable

from perennial.foundation.allocator import ask_for_large_pages, freeze_objects


def import_run() -> Callable[..., None]:
    """Import everything that a run needs; returns run_command of cli/run.py."""
    ask_for_large_pages()
    with freeze_objects():
        from perennial.cli.run import run_command
    return run_command
