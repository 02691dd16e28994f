"""What the Control API is asked, and what an app is, are byte for byte as Flower's own code has them."""

from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.proto.control_pb2 import (
    ListNodesResponse,
    ListRunsResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StartRunRequest,
    StartRunResponse,
    StopRunRequest,
    StreamLogsResponse,
    UnregisterNodeRequest,
)

from perennial.config.site import SiteConfig
from perennial.deploy import control, operations
from perennial.deploy.application import approve, pack_archive, read_offer, stage_application
from perennial.deploy.certificates import encode_public_line, make_node_key
from perennial.deploy.control import decode_fields, parse_runs
from perennial.deploy.federation import Federation, OperatorFolder, SiteRecord, create_operator_folder
from perennial.foundation.errors import StateError
from perennial.foundation.names import NODES

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


class Asked:
    """A Control API that notes a request and gives an answer. It knows no node."""

    def __init__(self, reply: bytes) -> None:
        self.reply, self.call, self.body = reply, "", b""

    def __call__(self, folder: OperatorFolder, call: str, body: bytes) -> "Asked":
        self.call, self.body = call, body
        return self

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int = -1) -> bytes:
        if self.call == "list-nodes":
            return b""
        data, self.reply = self.reply[:size] if size >= 0 else self.reply, self.reply[size:]
        return data


class Nodes:
    """A Control API that keeps nodes as Flower does; lose: the call whose next answer is lost."""

    def __init__(self) -> None:
        self.lose, self.kept = "", ListNodesResponse(now="now")

    def __call__(self, folder: OperatorFolder, call: str, body: bytes) -> Asked:
        if call == "register-node":
            asked = RegisterNodeRequest.FromString(body)
            if any(node.public_key == asked.public_key for node in self.kept.nodes_info):
                raise StateError("the SuperLink refuses register-node: Public key already in use.")
            number = 2**63 + len(self.kept.nodes_info)
            self.kept.nodes_info.add(node_id=number, status="registered", public_key=asked.public_key)
        if call == "unregister-node":
            number = UnregisterNodeRequest.FromString(body).node_id
            found = [node for node in self.kept.nodes_info if node.node_id == number]
            if not found or found[0].status == "unregistered":
                raise StateError("the SuperLink refuses unregister-node: Node ID not found for account.")
            found[0].status = "unregistered"
        if call == self.lose:
            self.lose = ""
            raise StateError(f"the SuperLink does not answer {call}")
        number = self.kept.nodes_info[-1].node_id if self.kept.nodes_info else 0
        reply = self.kept if call == "list-nodes" else RegisterNodeResponse(node_id=number)
        return Asked(reply.SerializeToString())


@pytest.fixture
def operator(tmp_path: Path) -> OperatorFolder:
    settings = Federation(name="trials", hosts=("127.0.0.1",), runtime="process")
    return create_operator_folder(tmp_path / "operator", settings, 2)


def test_requests_are_as_flower_reads_them(operator: OperatorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(StartRunResponse(run_id=2**64 - 1).SerializeToString())
    monkeypatch.setattr(control, "_call", asked)
    settings = {"name": "trial", "device": "cpu"}
    assert control.start_run(operator, b"x" * 300, "ab" * 32, settings) == str(2**64 - 1)
    request = StartRunRequest.FromString(asked.body)
    assert (request.fab.content, request.fab.hash_str) == (b"x" * 300, "ab" * 32)
    assert {key: value.string for key, value in request.override_config.items()} == settings
    operator.add_site("graz", encode_public_line(make_node_key()))
    asked.reply = b"\x08\x07"
    assert control.register_node(operator, "graz") == "7"
    request = RegisterNodeRequest.FromString(asked.body)
    assert request.name == "graz" and request.public_key.startswith(b"-----BEGIN PUBLIC KEY-----")
    control.stop_run(operator, str(2**63 + 7))
    assert asked.call == "stop-run" and StopRunRequest.FromString(asked.body).run_id == 2**63 + 7
    frames = (StreamLogsResponse(log_output=text).SerializeToString() for text in ("one", "two"))
    asked.reply = b"".join(len(frame).to_bytes(4) + frame for frame in frames)
    assert [*control.stream_log(operator, "7", follow=True)] == ["one", "two"]


@pytest.mark.parametrize("lost", ["the answer", "the file"])
def test_a_site_is_added_and_revoked_by_the_same_command_said_again(
    operator: OperatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    nodes, keys = Nodes(), [tmp_path / "old.pub", tmp_path / "new.pub"]
    monkeypatch.setattr(control, "_call", nodes)
    for path in keys:
        path.write_bytes(encode_public_line(make_node_key()))

    def fill_disk(name: str, record: SiteRecord) -> None:
        if record.state != "added":
            monkeypatch.undo()
            monkeypatch.setattr(control, "_call", nodes)
            raise StateError(f"{name}.yaml: could not be written")
        OperatorFolder.write_site(operator, name, record)

    def fail_once(call: str) -> None:
        if lost == "the answer":
            nodes.lose = call
        else:
            monkeypatch.setattr(operator, "write_site", fill_disk)

    fail_once("register-node")
    with pytest.raises(StateError, match="does not answer|could not be written"):
        list(operations.add_site(operator, "graz", keys[0]))
    list(operations.add_site(operator, "graz", keys[0]))
    assert operator.site("graz") == SiteRecord(state="registered", node=str(2**63))
    fail_once("unregister-node")
    with pytest.raises(StateError, match="is shut out" if lost == "the answer" else "not be written"):
        operations.revoke(operator, "graz")
    assert (operator.site("graz").state == "revoked") == (lost == "the answer"), "the gateway shuts it out"
    for _ in range(2):
        operations.revoke(operator, "graz")
        assert operator.site("graz").state == "revoked"
        assert nodes.kept.nodes_info[0].status == "unregistered"
        assert str(2**63) not in (operator.path / NODES).read_text()
    list(operations.add_site(operator, "graz", keys[1]))
    assert operator.site("graz") == SiteRecord(state="registered", node=str(2**63 + 1))


def test_runs_are_read_as_flower_writes_them() -> None:
    answer = ListRunsResponse(now="now")
    run = answer.run_dict[2**63 + 5]
    run.run_id, run.fab_hash = 2**63 + 5, "a" * 64
    run.status.status, run.status.sub_status = "finished", "completed"
    run.override_config["name"].string = "trial"
    run.override_config["threads"].sint64 = 3
    run.clientapp_runtime = 1.5
    found = parse_runs(answer.SerializeToString())[str(2**63 + 5)]
    assert (found.status, found.bundle, found.name) == ("finished:completed", "a" * 64, "trial")
    for damaged in (b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b"):
        with pytest.raises(ValueError, match="protocol buffer"):
            parse_runs(damaged)
    assert dict(decode_fields(b"\x08\xff\x01")) == {1: 255}


def test_an_app_has_the_bytes_and_the_folder_that_flower_gives_it(tmp_path: Path) -> None:
    app = stage_application(EXPERIMENTS / "quickstart.yaml", [], "", tmp_path / "apps")
    assert app.fab.read_bytes() == pack_archive(app.folder) == build_fab_from_disk(app.folder)
    installed = install_from_fab(app.fab, install_dir=tmp_path / "flower", skip_prompt=True)
    offer = read_offer(app.fab, SiteConfig(site="graz", state_dir=tmp_path / "state"))
    assert approve(offer, tmp_path / "own", tmp_path / "approvals").app == installed.name
    own = tmp_path / "own" / "apps" / installed.name
    assert {path.name: path.read_bytes() for path in own.iterdir()} == {
        path.name: path.read_bytes() for path in installed.iterdir()
    }
