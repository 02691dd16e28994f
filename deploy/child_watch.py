"""Ends a SuperNode or SuperLink when its SuperExec has ended, because without it neither serves anybody.

Flower starts the SuperExec as a child and never looks at it again. Without it no app is started, while the
parent goes on answering health checks. Here the parent ends too, so that the container or the unit restarts
both.
"""

import logging
import os
import subprocess
import threading
import time
from types import ModuleType
from typing import Any

log = logging.getLogger("perennial.deploy")
POLL = 1.0
"""Seconds between two looks at the child."""
STOPPED_FOR = 20.0
"""Seconds that a child may be stopped (SIGSTOP) before it counts as dead."""
ENDED = 70
"""Exit status of a process that ends because its child did: 'internal software error' of sysexits.h."""


def end_with_child(module: ModuleType, program: str) -> None:
    """Watch every process that module starts by the name program, from now on.

    module: a module that starts processes by its own `subprocess`. When such a process ends, or is stopped
    for STOPPED_FOR seconds, this process says so in its log and ends with status ENDED.
    """

    class Watched(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
            super().__init__(args, *more, **settings)
            if os.path.basename(args[0]) == program:
                threading.Thread(target=_watch, args=(self, program), daemon=True).start()

    replaced = ModuleType("subprocess")
    vars(replaced).update(vars(subprocess), Popen=Watched)
    vars(module)["subprocess"] = replaced


def _watch(process: "subprocess.Popen[Any]", program: str) -> None:
    stopped_since: float | None = None
    while (how := process.poll()) is None:
        stopped_since = (stopped_since or time.monotonic()) if is_stopped(process.pid) else None
        if stopped_since is not None and time.monotonic() - stopped_since > STOPPED_FOR:
            process.kill()
            _end(f"{program} (process {process.pid}) was stopped for {STOPPED_FOR:.0f} s")
        time.sleep(POLL)
    _end(f"{program} (process {process.pid}) ended with status {how}")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), as far as this system says so: by /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _end(reason: str) -> None:
    log.error("%s; without it no app is started here, so this process ends; start it again", reason)
    logging.shutdown()
    os._exit(ENDED)
