"""`python -m perennial.deploy.superlink_process`: Flower's SuperLink, with a database that waits.

Flower 1.39 gives a writer of its SQLite file 5 s; then the call ends with "database is locked", and with it
the run. A model of hundreds of megabytes keeps the file busy for longer on a slow or busy disk.
"""

import sys

from perennial.deploy.admission import give_reasons
from perennial.deploy.child_watch import end_with_child
from perennial.deploy.flower_seam import flower_superlink, sql_mixin, superlink_module

BUSY_TIMEOUT = 120_000
"""Milliseconds."""


def wait_for_the_database() -> None:
    """Let every connection that this process opens from now on wait BUSY_TIMEOUT for the file."""
    sql_mixin.SQLITE_PRAGMAS = tuple(  # pyright: ignore[reportPrivateImportUsage]
        (name, str(BUSY_TIMEOUT) if name == "busy_timeout" else value)
        for name, value in sql_mixin.SQLITE_PRAGMAS  # pyright: ignore[reportPrivateImportUsage]
    )


if __name__ == "__main__":
    wait_for_the_database()
    give_reasons()
    superexec = [sys.executable, "-m", "perennial.deploy.superexec_process"]
    end_with_child(superlink_module, "flower-superexec", instead=superexec)
    flower_superlink()
