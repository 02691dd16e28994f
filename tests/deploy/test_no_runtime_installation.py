"""Nothing is installed at a site for an app while it runs."""

import json
import socket
from types import SimpleNamespace

import pytest

from perennial.deploy import supernode
from perennial.deploy.flower_seam import TaskType, subprocess_executor
from perennial.deploy.superexec_process import launch_by_forking


def test_a_clientapp_is_started_without_installing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where somebody starts the SuperNode with Flower's option for it."""
    executor = subprocess_executor.SubprocessExecutor
    monkeypatch.setattr(executor, "launch", executor.launch)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        launch_by_forking(lambda: ours)
        spec = SimpleNamespace(
            task_type=TaskType.CLIENT_APP,
            runtime_api_address="localhost:1",
            token="t",
            insecure=True,
            parent_pid=1,
            runtime_dependency_install=True,
            root_certificates_path=None,
            fab_hash="ab" * 32,
        )
        executor.launch(None, spec)  # pyright: ignore
        assert json.loads(theirs.recv(2**16))["runtime_dependency_install"] is False


def test_a_supernode_is_never_started_with_the_option() -> None:
    with open(supernode.__file__, encoding="utf-8") as file:
        assert "runtime-dependency-installation" not in file.read()
