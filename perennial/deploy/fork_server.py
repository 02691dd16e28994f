"""Starts a process for each message by forking one that has imported PyTorch and the ClientApp already.

Run as a script, and free of imports of Perennial: an app with code of its own, which its hospital has named,
brings that name itself; every other app is answered by the Perennial installed here. The server runs no
message itself. Each is answered in a process of its own, which ends with it, as Flower does it; only the
imports are shared.

One process has the libraries (the fork server). From it comes one for each app in use (an app server), with
the ClientApp too; it is replaced when the app's folder changes, and ends after IDLE seconds.
"""

import atexit
import gc
import hashlib
import importlib
import json
import logging
import os
import random
import select
import socket
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = ("httpcore", "numpy.ma", "torch", "pydantic", "yaml", "safetensors.torch")
"""Beside Flower; httpx imports httpcore when the first client is made."""
FIRST_WAIT = 0.05
"""Seconds until a part of a message that was not there yet is asked for again; then twice as many."""
IDLE = 1800.0
"""Seconds without a message after which an app server ends."""
POLL_SECONDS = 1.0
"""Seconds between two looks at the children."""
STOPPED_FOR = 20.0
"""Seconds that an app server may be stopped (SIGSTOP) before it is replaced."""
LARGEST = 2**16
"""Bytes of a request."""
log = logging.getLogger("perennial.site")


@dataclass
class AppServer:
    """A process that has imported one app. stamp: what its folder was like then."""

    process: int
    channel: socket.socket
    folder: Path
    stamp: tuple[int, int]
    stopped_since: float | None = None


class ForkServer:
    """Forks for each request: what become_clientapp() takes, and the bundle's SHA-256 or null.

    channel: a Unix socket that keeps requests apart (SOCK_SEQPACKET); the server ends when its other end is
    closed. seam: deploy/flower_seam.py. apps: folder of unpacked apps, whose names end in eight digits of the
    bundle's SHA-256; None for an app server. unpacked: the folder of the app that an app server has imported.
    killed: descriptor of a pipe that takes a line with the token of each ClientApp that was killed; -1: none.
    """

    def __init__(
        self, channel: socket.socket, seam: Any, apps: Path | None, killed: int, unpacked: Path | None = None
    ) -> None:
        self._channel, self._seam, self._apps, self._unpacked = channel, seam, apps, unpacked
        self._killed = killed
        self._tokens: dict[int, str] = {}
        self._servers: dict[str, AppServer] = {}

    def serve(self) -> None:
        """Answer requests until the other end is closed. A forked process leaves by SystemExit."""
        latest = time.monotonic()
        while True:
            readable, _, _ = select.select([self._channel], [], [], POLL_SECONDS)
            self._look_after_children()
            if readable:
                if not (packet := self._channel.recv(LARGEST)):
                    return
                latest = time.monotonic()
                self._answer(packet)
            elif self._unpacked is not None and time.monotonic() - latest > IDLE:
                return

    def _answer(self, packet: bytes) -> None:
        request = json.loads(packet)
        for _ in range(2):
            if (server := self._app_server(request["bundle"])) is None:
                break
            try:
                server.channel.send(packet)
                return
            except OSError:
                self._drop(request["bundle"])  # it has ended; its place is taken by another
        if process := os.fork():
            self._tokens[process] = request["token"]
        else:
            self._close()
            with suppress(OSError):
                os.close(self._killed)
            leave_after(partial(become_clientapp, self._seam, self._unpacked, **request))

    def _app_server(self, bundle: str | None) -> AppServer | None:
        """The process that has imported an app, or None if its code is not unpacked here."""
        folders = sorted(self._apps.glob(f"*.{bundle[:8]}")) if self._apps and bundle else []
        if bundle is None or len(folders) != 1:
            return None
        stamp = folders[0].stat().st_ino, folders[0].stat().st_ctime_ns
        known = self._servers.get(bundle)
        if known is not None and (known.folder, known.stamp) != (folders[0], stamp):
            self._drop(bundle)
        if bundle not in self._servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not (process := os.fork()):
                ours.close()
                self._close()
                load(folders[0])
                ForkServer(theirs, self._seam, None, self._killed, folders[0]).serve()
                sys.exit(0)
            theirs.close()
            self._servers[bundle] = AppServer(process, ours, folders[0], stamp)
        return self._servers[bundle]

    def _drop(self, bundle: str) -> None:
        self._servers.pop(bundle).channel.close()

    def _close(self) -> None:
        """In a forked process: it holds no end of any channel, so that each closes with its owner."""
        self._channel.close()
        for bundle in list(self._servers):
            self._drop(bundle)

    def _look_after_children(self) -> None:
        while ended := _ended_child():
            process, status = ended
            for bundle in [known for known, server in self._servers.items() if server.process == process]:
                self._drop(bundle)
            token = self._tokens.pop(process, "")
            if os.WIFSIGNALED(status):
                log.warning("process %d ended by signal %d", process, os.WTERMSIG(status))
                if token:
                    with suppress(OSError):
                        os.write(self._killed, f"{token}\n".encode())
        for server in self._servers.values():
            if not is_stopped(server.process):
                server.stopped_since = None
            elif server.stopped_since is None:
                server.stopped_since = time.monotonic()
            elif time.monotonic() - server.stopped_since > STOPPED_FOR:
                os.kill(server.process, 9)


def load(folder: Path) -> None:
    """Import the ClientApp of an unpacked app, and what its module's prepare(run_config) asks for.

    What fails here fails again, and is reported, in the process of each message.
    """
    try:
        app = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        sys.path.insert(0, str(folder.absolute()))
        module = importlib.import_module(app["components"]["clientapp"].partition(":")[0])
        prepare = getattr(module, "prepare", None)
        if prepare is not None:
            prepare(app.get("config", {}))
    except Exception:
        log.exception("%s: could not be imported ahead of its messages", folder)
    settle()


def settle() -> None:
    """Exclude all present memory from garbage collection, so that forked processes share it."""
    gc.collect()
    gc.freeze()


def become_clientapp(
    seam: Any, unpacked: Path | None, *, bundle: str | None, root_certificates: str | None, **task: Any
) -> NoReturn:
    """Be the ClientApp of one task; its token appears in no process list.

    seam: deploy/flower_seam.py. unpacked: folder of the app with SHA-256 `bundle`, which is not unpacked
    again for each message only to be compared. root_certificates: path of a PEM file. task: as Flower's
    run_clientapp takes it.
    """
    import numpy

    # every fork would draw alike from generators that were seeded when their libraries were imported
    random.seed()
    numpy.random.seed()  # noqa: NPY002
    _name_process("flwr-clientapp")
    module = seam.run_clientapp_module
    module.pull_and_inflate_object_from_tree = partial(
        module.pull_and_inflate_object_from_tree, initial_backoff=FIRST_WAIT
    )
    if unpacked is not None:
        install = module.install_from_fab

        def install_once(content: bytes, **settings: Any) -> Path:
            same = hashlib.sha256(content).hexdigest() == bundle
            return unpacked if same and unpacked.is_dir() else install(content, **settings)

        module.install_from_fab = install_once
    certificates = Path(root_certificates).read_bytes() if root_certificates else None
    module.run_clientapp(**task, certificates=certificates)
    sys.exit(0)


def leave_after(work: Callable[[], object]) -> NoReturn:
    """Do work, then end this forked process without taking the interpreter apart.

    That would write to every page that it shares with the process that it was forked from, and so copy them:
    0.2 s and 150 MB for nothing. Exit functions are called and output is flushed as at any other end.
    """
    status = 1
    try:
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped (SIGSTOP), as far as this system says so: by /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _ended_child() -> tuple[int, int] | None:
    try:
        process, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, status) if process else None


def _name_process(name: str) -> None:
    """What `ps` and the kernel's log call this process (Linux)."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8")


def load_seam() -> Any:
    """deploy/flower_seam.py, which imports nothing of Perennial either."""
    spec = spec_from_file_location("flower_seam", Path(__file__).with_name("flower_seam.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["flower_seam"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(descriptor: str, apps: str, killed: str = "-1") -> None:
    """descriptor: of the inherited channel. apps: folder of unpacked apps. killed: as in ForkServer."""
    logging.basicConfig(format="%(levelname)s %(asctime)s: %(message)s")
    _name_process("fork-server")
    seam = load_seam()
    assert seam.run_clientapp_module is not None
    for library in LIBRARIES:
        importlib.import_module(library)
    seam.plain_logs()
    settle()
    options: dict[str, Any] = {"fileno": int(descriptor)}
    ForkServer(socket.socket(**options), seam, Path(apps), int(killed)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
