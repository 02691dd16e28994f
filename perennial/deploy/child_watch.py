"""Ends a SuperNode or SuperLink when its SuperExec has ended, because without it neither serves anybody.

Flower starts the SuperExec as a child and never looks at it again. Without it no app is started, while the
parent goes on answering health checks. Here the parent ends too, so that the container or
the unit restarts both.
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from perennial.deploy.flower_seam import give_own
from perennial.deploy.fork_server import is_stopped

log = logging.getLogger("perennial.deploy")
POLL = 1.0
"""Seconds between two looks at the child."""
STOPPED_FOR = 5.0
"""Seconds that a child may be stopped (SIGSTOP) before it counts as dead."""
ENDED = 70
"""Exit status of a process that ends because its child did: 'internal software error' of sysexits.h."""


def end_with_child(
    module: ModuleType, program: str, instead: Sequence[str] = (), inherits: Sequence[int] = ()
) -> None:
    """Watch every process that module starts by the name program, from now on.

    When such a process ends, or is stopped for STOPPED_FOR seconds, this process says so in its log and ends
    with status ENDED.
    module: a module that starts processes by its own `subprocess`.
    instead: what to start in the program's place, with the program's arguments.
    inherits: file descriptors that it inherits.
    """

    class Watched(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
            if watched := os.path.basename(args[0]) == program:
                args = [*(instead or args[:1]), *args[1:]]
                settings["pass_fds"] = inherits
            super().__init__(args, *more, **settings)
            if watched:
                threading.Thread(target=watch, args=(self, program), daemon=True).start()

    give_own(module, "subprocess", Popen=Watched)


def watch(process: "subprocess.Popen[Any]", program: str) -> None:
    """End this process when a child has ended, or was stopped for STOPPED_FOR seconds."""
    stopped_since: float | None = None
    while (how := process.poll()) is None:
        stopped_since = (stopped_since or time.monotonic()) if is_stopped(process.pid) else None
        if stopped_since is not None and time.monotonic() - stopped_since > STOPPED_FOR:
            process.kill()
            _end(f"{program} (process {process.pid}) was stopped for {STOPPED_FOR:.0f} s")
        time.sleep(POLL)
    _end(f"{program} (process {process.pid}) ended with status {how}")


def _end(reason: str) -> None:
    log.error("%s; without it no app is started here, so this process ends; start it again", reason)
    logging.shutdown()
    os._exit(ENDED)
