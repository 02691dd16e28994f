"""Runs a console script of Flower in a fork of a process that has imported it and what its app needs.

Flower starts `flwr-clientapp` for each message, and each start imports PyTorch anew. A stand-in of that name,
first on PATH, hands the call over to this process, which forks (`python -m perennial.deploy.warm`). The
script itself is Flower's own, found by its entry point. Each fork ends with its message, so nothing of a
hospital's data outlives it.
"""

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

SOCKET = "PERENNIAL_WARM"
"""Environment variable of the stand-in: the path of the socket."""
RESTART = 75
"""Exit status when a fork was killed: 'temporary failure' of sysexits.h. Its SuperNode would wait for it."""
SCRIPTS = (
    *("flwr-agentapp", "flwr-clientapp", "flwr-connector"),
    *("flwr-model", "flwr-serverapp", "flwr-simulation"),
)
"""All that a SuperExec may start. The SuperLink names one of them with each task."""
LARGEST = 2**16
"""Bytes of a request."""
STAND_IN = f"""#!{{python}} -ISP
# Stand-in for Flower's command of the same name: the process that listens at ${SOCKET} runs it in a fork.
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["{SOCKET}"])
    request = json.dumps({{{{"argv": sys.argv, "cwd": os.getcwd()}}}}).encode()
    socket.send_fds(s, [request], [0, 1, 2])
    sys.exit(0 if s.recv(1) else 1)
"""
REFUSAL = """#!/bin/sh
echo "$(basename "$0"): not run here; the other side asked for it" >&2
exit 1
"""
log = logging.getLogger("perennial.deploy")


def write_stand_ins(folder: Path, script: str) -> None:
    """Write the stand-in for a console script into a folder that goes first on PATH.

    Flower's other scripts, which would unpack an app and run it, get one that refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        path = folder / name
        path.unlink(missing_ok=True)
        text = STAND_IN.format(python=sys.executable) if name == script else REFUSAL
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)


def serve(path: Path, script: str, modules: list[str], approvals: Path | None = None) -> NoReturn:
    """Fork for each call that arrives. Ends with RESTART when a fork was killed.

    Args:
        path: of the socket, which answers processes of the same user alone.
        script: name of Flower's console script.
        modules: imported before the first call.
        approvals: of a site, whose apps are pinned.
    """
    # first of all: a call that arrives while PyTorch is imported waits, and is not refused
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    listener.bind(str(path))
    os.umask(mask)
    listener.listen(64)
    (entry,) = entry_points(group="console_scripts", name=script)
    run = entry.load()
    for module in modules:
        importlib.import_module(module)
    if approvals is not None:
        from perennial.deploy.pinned_app import pin_client_app

        pin_client_app(approvals)
    if "numpy" in sys.modules:
        # every fork would draw alike from NumPy's own generator; Python seeds its one again by itself
        os.register_at_fork(after_in_child=sys.modules["numpy"].random.seed)
    gc.collect()
    gc.freeze()  # so that forks share what is there
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        connection, _ = listener.accept()
        with connection:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, user, _ = struct.unpack("3i", peer)
            data, streams, _, _ = socket.recv_fds(connection, LARGEST, 3)
            if user == os.getuid() and len(streams) == 3:
                _fork(listener, json.loads(data), streams, run)
                with suppress(OSError):
                    connection.send(b"1")
            for stream in streams:
                os.close(stream)


def _fork(listener: socket.socket, request: dict[str, object], streams: list[int], run: object) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(str(request["cwd"]))
        sys.argv = [str(word) for word in request["argv"]]  # type: ignore[attr-defined]  # pyright: ignore
        with suppress(OSError):
            Path("/proc/self/comm").write_text(Path(sys.argv[0]).name, encoding="utf-8")
        run()  # type: ignore[operator]  # pyright: ignore
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _reap(number: int, frame: object) -> None:
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        if os.WIFSIGNALED(status):
            log.error("process %d was killed by signal %d", process, os.WTERMSIG(status))
            os._exit(RESTART)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(asctime)s: %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--approvals", type=Path)
    parser.add_argument("socket", type=Path)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("modules", nargs="*")
    given = parser.parse_args()
    serve(given.socket, given.script, given.modules, given.approvals)
