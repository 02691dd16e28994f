"""Sites reach the operator through the gateway alone, and nothing of it but Flower's Fleet API."""

import asyncio
import base64
import json
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
from starlette.responses import Response

from perennial.deploy.certificates import encode_public_line, make_node_key
from perennial.deploy.federation import SiteRecord, read_site_record
from perennial.deploy.gateway import FLEET, PULL, REPLY
from perennial.deploy.handshake import (
    CLOCK,
    CONNECTED,
    REVOKED,
    UNREGISTERED,
    check_admission,
    sign_headers,
)
from perennial.foundation.errors import StateError
from tests.gateway_world import NODE, World, make_reply, serve_world

ALLOWED = {path.decode() for path in FLEET}
OTHERS = (
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serve_world(tmp_path_factory.mktemp("gateway") / "operator") as world:
        yield world


@pytest.fixture
def world(served: World) -> World:
    served.reached.clear()
    served.answers.clear()
    return served


def test_a_registered_site_reaches_the_fleet_and_nothing_else(world: World) -> None:
    asked = {path: make_reply() if path == REPLY else b"asked" for path in sorted(ALLOWED)}
    for path, content in asked.items():
        assert world.post(path, content=content).content == b"answer"
    assert world.reached == [("POST", path, content) for path, content in asked.items()]
    world.reached.clear()
    for path in OTHERS:
        assert world.post(path).status_code == 404
    assert not world.reached


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/docs", "/openapi.json", "/health", "/v1/fleet", "/v1/fleet/", "//v1/fleet/get-run"),
        *("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/get-run/"),
        *("/v1/fleet%2fget-run", "/v1/%66leet/get-run", "/v1/fleet/get-run%00", "/v1/fleet/get-run;x"),
        *("/v1/fleet/get-run?x=1", "/v1/fleet/get-run?", "/V1/fleet/get-run", "/v1/fleet\\get-run"),
        *("/v1/fleet/get-run%3f", "/v1/./fleet/get-run", "/v1/fleet/get-run/../../control/start-run"),
        "/v1/fleet/get-run%2f..%2f..%2fcontrol%2fstart-run",
    ],
)
def test_a_path_passes_letter_for_letter_alone(world: World, path: str) -> None:
    line = (
        b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n" + world.signed() + b"\r\n"
    )
    status = world.raw(line).split(b" ")[1:2]
    # a question mark with nothing behind it is the path itself
    assert status in ([b"404"], [b"400"], [b"405"]) or path.endswith("get-run?")
    assert all(path in ALLOWED for _, path, _ in world.reached)


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"]
)
@pytest.mark.parametrize("path", ["/v1/fleet/get-run", "/v1/control/list-runs", "/admission"])
def test_no_other_method_passes(world: World, method: str, path: str) -> None:
    line = f"{method} {path} HTTP/1.1\r\nhost: x\r\n".encode() + world.signed() + b"\r\n"
    assert world.raw(line).split(b" ")[1:2] in ([b"404"], [b"405"], [b"400"])
    assert not world.reached


def test_upgrades_are_refused(world: World) -> None:
    head = b"GET /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n"
    socket_key = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    for kind in (b"upgrade: websocket\r\n" + socket_key, b"upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"):
        assert b" 101 " not in world.raw(head + kind + world.signed() + b"\r\n")[:20]
    assert world.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").split(b" ")[1:2] in (
        [b"400"],
        [],
        [b"404"],
        [b"505"],
    )
    assert not world.reached


@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 5\r\ncontent-length: 60\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"content-length: +5\r\n",
        b"content-length: 5, 60\r\n",
        b"content-length : 5\r\n",
        b"transfer-encoding: chunked, identity\r\n",
    ],
)
def test_no_second_request_is_smuggled_in_a_body(world: World, lengths: bytes) -> None:
    inside = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\n\r\n"
    line = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\n" + lengths + world.signed() + b"\r\n"
    world.raw(line + b"0\r\n\r\n" + inside)
    assert all(path in ALLOWED for _, path, _ in world.reached)


def test_without_the_key_of_a_registered_site_there_is_nothing(world: World) -> None:
    for path in (*sorted(ALLOWED), *OTHERS, "/admission"):
        assert world.post(path, None).status_code in (401, 403, 404)
        assert world.post(path, "stranger").status_code in (401, 403, 404)
    assert UNREGISTERED in world.post("/admission", "stranger").text
    assert UNREGISTERED in world.post("/admission", "wels").text, "added, and not registered"
    assert world.post("/admission", "linz").text.strip() == REVOKED
    forged = sign_headers(world.keys["graz"]) | {"flwr-timestamp": "2026-01-01T00:00:00+00:00"}
    assert world.post("/admission", None, headers=forged).status_code == 401
    other = sign_headers(world.keys["stranger"])
    mixed = other | {"flwr-public-key": sign_headers(world.keys["graz"])["flwr-public-key"]}
    assert world.post("/admission", None, headers=mixed).status_code == 401
    for junk in ("", "!", base64.b64encode(b"x" * 5000).decode()):
        assert world.post("/admission", None, headers=other | {"flwr-public-key": junk}).status_code == 401
    assert not world.reached


def test_a_clock_that_differs_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from perennial.deploy import gateway

    monkeypatch.setattr(gateway, "WINDOW", (-5.0, -1.0))
    assert world.post("/admission").text.strip() == CLOCK


def test_a_site_checks_its_key_by_the_same_words(world: World) -> None:
    address = f"127.0.0.1:{world.port}"
    check_admission(address, world.authority, world.keys["graz"], connected=True)
    with pytest.raises(StateError, match="revoked this site's key"):
        check_admission(address, world.authority, world.keys["linz"])


def test_bodies_end_at_their_limit_said_or_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLEET, b"/v1/fleet/get-run", 100)
    assert world.post("/v1/fleet/get-run", content=b"x" * 101).status_code == 413
    chunked = (
        b"transfer-encoding: chunked\r\n"
        + world.signed()
        + b"\r\n"
        + b"65\r\n"
        + b"x" * 101
        + b"\r\n0\r\n\r\n"
    )
    answer = world.raw(b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\n" + chunked)
    assert answer.split(b" ")[1] == b"413" and not world.reached


def test_a_question_waits_for_its_message_and_a_busy_database_is_asked_again(world: World) -> None:
    world.answers += [
        Response(b""),
        Response(b"database is locked", 500),
        Response(b""),
        Response(b"message"),
    ]
    began = time.monotonic()
    assert world.post(PULL).content == b"message" and len(world.reached) == 4
    assert 0.2 < time.monotonic() - began < 8


def test_a_killed_supernode_makes_room_for_the_next_and_a_live_one_does_not(world: World) -> None:
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    assert world.gateway is not None
    world.answers += [Response(b"node 1"), Response(b"connected", 409)]
    assert world.post("/v1/fleet/activate-node").content == b"node 1"
    assert world.post("/admission").text == "connected"
    again = world.post("/v1/fleet/activate-node")
    assert again.status_code == 409 and again.text.strip() == CONNECTED
    world.gateway.seen[NODE].last -= 60
    world.answers += [Response(b"connected", 409), Response(b""), Response(b"node 8")]
    assert world.post("/v1/fleet/activate-node").content == b"node 8"
    gone = ("POST", "/v1/fleet/deactivate-node", DeactivateNodeRequest(node_id=int(NODE)).SerializeToString())
    assert gone in world.reached


def test_who_is_connected_is_what_was_seen(world: World) -> None:
    assert world.gateway is not None
    world.post("/v1/fleet/send-node-heartbeat")
    status = asyncio.run(world.gateway.status())
    assert status["sites"] == {"graz": None} and status["others"] == {"linz": "revoked", "wels": "added"}
    world.gateway.seen[NODE].last -= 60
    assert asyncio.run(world.gateway.status())["sites"]["graz"] == pytest.approx(time.time() - 60, abs=5)
    json.dumps(status)


def test_a_damaged_record_of_a_run_hides_no_site(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert world.gateway is not None
    path = world.folder.apps / "trial.runs.json"
    path.write_text("{")
    for _ in range(2):
        status = asyncio.run(world.gateway.status())
        assert "graz" in status["sites"] and status["unknown"] == {}
    (line,) = caplog.messages
    assert str(path) in line
    path.unlink()


def test_a_renewed_certificate_counts_once_it_is_served(world: World) -> None:
    assert world.gateway is not None
    before = asyncio.run(world.gateway.status())
    world.folder.renew_server(400)
    after = asyncio.run(world.gateway.status())
    assert after["certificate_ends"] == before["certificate_ends"] < time.time() + 3 * 86_400
    assert after["certificate_waits"] and not before["certificate_waits"]


def test_a_header_that_stands_twice_gets_nowhere(world: World) -> None:
    line = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n".encode()
    answer = world.raw(line + world.signed() + world.signed("linz") + b"\r\n")
    assert answer.split(b" ")[1:2] == [b"400"] and world.reached == []


def test_a_new_key_does_not_wait_for_the_requests_of_the_revoked_one(world: World) -> None:
    folder, keys = world.folder, world.keys
    folder.write_site("wels", SiteRecord(state="registered", node="11"))
    world.post("/v1/fleet/send-node-heartbeat", "wels")
    assert world.post("/admission", "wels").text == "connected"
    folder.write_site("wels", SiteRecord(state="revoked", node="11"))
    assert world.post("/admission", "wels").text.strip() == REVOKED
    keys["wels"] = make_node_key()
    folder.add_site("wels", encode_public_line(keys["wels"]))
    folder.write_site("wels", SiteRecord(state="registered", node="12"))
    assert world.post("/admission", "wels").text == "free"


def test_a_revocation_counts_where_other_files_have_a_time_of_the_future(world: World) -> None:
    sites, ahead = world.folder.path / "sites", time.time() + 3600
    for path in sites.iterdir():
        os.utime(path, (ahead, ahead))
    os.utime(sites, (ahead, ahead))
    assert world.post("/admission").status_code == 200
    # as by an editor that writes in place: nothing but this file changes
    path = sites / "graz.yaml"
    registered = path.read_text()
    path.write_text(registered.replace("registered", "revoked"))
    assert world.post("/admission").text.strip() == REVOKED
    path.write_text(registered)
    assert world.post("/admission").status_code == 200


@pytest.mark.parametrize("state", ["registered", "revoked"])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("wels.yaml", b"state: aded\nnode: ''\n"),
        ("wels.yaml", b""),
        ("wels.yaml", b"\xff"),
        ("wels.pub", None),
        ("wels.pub", b"ssh-rsa AAAA"),
    ],
)
def test_a_site_whose_files_cannot_be_read_is_shut_out_alone(
    world: World,
    caplog: pytest.LogCaptureFixture,
    file: str,
    content: bytes | None,
    state: Literal["registered", "revoked"],
) -> None:
    assert world.gateway is not None
    path, record = world.folder.path / "sites" / file, SiteRecord(state=state, node="11")
    world.folder.write_site("wels", record)
    assert world.post("/admission", "wels").status_code == (200 if state == "registered" else 401)
    key = world.folder.locate_public_key("wels").read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    for _ in range(2):
        assert world.post("/admission", "wels").text.strip() == UNREGISTERED
        assert world.post("/admission").status_code == 200, "graz is let in as before"
        assert world.post("/admission", "linz").text.strip() == REVOKED
    (line,) = caplog.messages
    assert line.startswith("wels counts as not registered")
    status = asyncio.run(world.gateway.status())
    assert "graz" in status["sites"] and status["others"] == {"linz": "revoked", "wels": "added"}
    world.folder.locate_public_key("wels").write_bytes(key)
    world.folder.write_site("wels", record)
    assert world.post("/admission", "wels").status_code == (200 if state == "registered" else 401)


def test_a_file_that_goes_while_it_is_read_shuts_out_its_site_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perennial.deploy import site_keys

    def lose(path: Path) -> SiteRecord:
        path.unlink()
        return read_site_record(path)

    world.folder.write_site("wels", SiteRecord(state="registered", node="11"))
    monkeypatch.setattr(site_keys, "read_site_record", lose)
    assert world.post("/admission").status_code == 200
    assert world.post("/admission", "wels").text.strip() == UNREGISTERED
    world.folder.write_site("wels", SiteRecord())


def test_a_revoked_key_is_not_let_in_under_another_name(world: World) -> None:
    copy = world.folder.locate_public_key("xanten")
    copy.write_bytes(world.folder.locate_public_key("linz").read_bytes())
    world.folder.write_site("xanten", SiteRecord(state="registered", node="2"))
    assert world.post("/admission", "linz").text.strip() == REVOKED
    copy.unlink()
    copy.with_suffix(".yaml").unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_path_of_the_superlinks_own_page_is_refused_to_a_client_without_a_key() -> None:
    """A client that holds the authority's certificate, and no key, against a SuperLink of Flower itself."""
    from tests.loopback import Deployment

    with Deployment(["graz"]) as there:
        there.init()
        there.start_superlink()
        context = ssl.create_default_context(cafile=there.operator / "certificates" / "ca.crt")
        with httpx.Client(verify=context, timeout=30) as client:
            inside, outside = (f"https://127.0.0.1:{port}" for port in (there.control, there.fleet))
            paths = client.get(f"{inside}/openapi.json").json()["paths"]
            assert len(paths) > 30 and "/v1/control/start-run" in paths
            # on loopback, where Flower asks nobody who he is
            kind = {"content-type": "application/protobuf"}
            assert client.post(f"{inside}/v1/control/list-runs", headers=kind).status_code == 200
            for path in paths:
                for form in (
                    path,
                    path.replace("/v1/", "/v1%2f"),
                    f"/v1/fleet/..{path}",
                    f"{path}/",
                    f"/{path}",
                ):
                    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                        url = httpx.URL(outside).copy_with(raw_path=form.encode())
                        status = client.request(method, url, headers=kind).status_code
                        assert status in (401, 403, 404, 405), f"{method} {form}: {status}"
