"""`python -m perennial.deploy.superlink_process FOLDER`: the SuperLink of an operator's folder, Flower's own.

It says in the folder of all runs that it lives and who is connected, and its database waits.

Flower 1.39 gives a writer of its SQLite file 5 s; then the call ends with "database is locked", and with it
the run. A model of hundreds of megabytes keeps the file busy for longer on a slow or busy disk.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from perennial.deploy.admission import give_reasons
from perennial.deploy.certificates import read_validity
from perennial.deploy.child_watch import end_with_child
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.flower_seam import (
    NodeStatus,
    flower_superlink,
    plain_logs,
    sql_mixin,
    superlink_module,
)
from perennial.deploy.run_book import FlowerRun, RunBook
from perennial.deploy.superlink_status import SilentSites, keep_status
from perennial.deploy.waiting_pulls import let_pulls_wait
from perennial.foundation.registered import NODES, registered_names

BUSY_TIMEOUT = 120_000
"""Milliseconds."""
PROBE = "heartbeat interval"
"""In what Flower says of a site that checks its key (deploy/admission.py)."""


def wait_for_the_database() -> None:
    """Let every connection that this process opens from now on wait BUSY_TIMEOUT for the file."""
    sql_mixin.SQLITE_PRAGMAS = tuple(  # pyright: ignore[reportPrivateImportUsage]
        (name, str(BUSY_TIMEOUT) if name == "busy_timeout" else value)
        for name, value in sql_mixin.SQLITE_PRAGMAS  # pyright: ignore[reportPrivateImportUsage]
    )


def say_who_is_connected(folder: Path) -> None:
    """Let the SuperLink of this process write its status beside the runs. folder: the operator's."""
    startup, operator = superlink_module.SuperLinkLifespan.startup, OperatorFolder(folder)
    ends = min(found.ends for found in read_validity(folder / "certificates" / "server.pem"))

    def start_and_say(self: Any) -> None:
        startup(self)
        silent, record = SilentSites(self.state_factory.state(), NodeStatus.ONLINE), folder / NODES

        def sites() -> dict[str, float | None]:
            return silent.look(registered_names(record) if record.exists() else {})

        def others() -> dict[str, str]:
            return {name: site.state for name, site in operator.sites().items() if site.state != "registered"}

        def runs() -> dict[str, FlowerRun]:
            listed = self.state_factory.state().get_run_info(order_by="pending_at")
            return {
                str(run.run_id): FlowerRun(
                    ":".join(filter(None, (run.status.status, run.status.sub_status))),
                    run.fab_hash,
                    str(run.override_config.get("name", "")),
                )
                for run in listed
            }

        unknown = RunBook(operator.apps).unknown
        keep_status(folder / "state" / "runs", ends.timestamp(), sites, others, runs, unknown)

    superlink_module.SuperLinkLifespan.startup = start_and_say


def answer_when_there_is_a_message() -> None:
    """Let the SuperLink of this process hold a node's request for messages until one has come."""
    startup = superlink_module.SuperLinkLifespan.startup

    def wait_and_start(self: Any) -> None:
        let_pulls_wait(type(self.state_factory.state()))
        startup(self)

    superlink_module.SuperLinkLifespan.startup = wait_and_start


def be_quiet() -> None:
    """Log no line for each request of the Control API, and none for a site that checks its own key."""
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    logging.getLogger("flwr").addFilter(lambda record: PROBE not in record.getMessage())


if __name__ == "__main__":
    plain_logs()
    be_quiet()
    folder = Path(sys.argv.pop(1))
    wait_for_the_database()
    say_who_is_connected(folder)
    answer_when_there_is_a_message()
    give_reasons()
    superexec = [sys.executable, "-m", "perennial.deploy.superexec_process"]
    end_with_child(superlink_module, "flower-superexec", instead=superexec)
    flower_superlink()
