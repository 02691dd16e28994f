"""Whether the SuperLink lets a node in, and if not, why: three reasons, three remedies.

Flower 1.39 answers "Failed to activate SuperNode" for all of them. Here the SuperLink adds the reason, for
whoever has proved to hold the key, and a site asks for it without connecting: it asks to be activated with a
heartbeat that Flower refuses once it has found the key, so a SuperNode that runs is not disturbed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from perennial.deploy.flower_seam import (
    ActivateNodeRequest,
    ApiErrorCode,
    DeactivateNodeRequest,
    FleetStub,
    FlowerError,
    NodeAuthClientInterceptor,
    NodeStatus,
    RuntimeVersionClientInterceptor,
    create_channel,
    fleet_message_handler,
    public_key_to_bytes,
)
from perennial.deploy.handshake import Unreachable
from perennial.deploy.reasons import CLOCK, CONNECTED, REASONS, REVOKED, UNREGISTERED
from perennial.foundation.errors import StateError, shown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SECONDS = 10
NO_HEARTBEAT = 0.0
"""An interval that Flower refuses, after it has looked for the key."""


def give_reasons() -> None:
    """Let the SuperLink of this process say why it does not activate a node."""
    activate = fleet_message_handler.activate_node

    def activate_or_say_why(request: Any, state: Any) -> Any:
        try:
            return activate(request=request, state=state)
        except fleet_message_handler.InvalidHeartbeatIntervalError as error:
            code, reason = ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL, str(error)
        except ValueError as error:
            code, reason = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, str(error)
        raise FlowerError(code, reason, public_details=_reason(request.public_key, state))

    vars(fleet_message_handler).update(activate_node=activate_or_say_why)


def _reason(public_key: bytes, state: Any) -> str | None:
    """Why the holder of a key is not let in; None: it could be."""
    found = {node.status for node in state.get_node_info() if node.public_key == public_key}
    if NodeStatus.ONLINE in found:
        return CONNECTED
    if NodeStatus.UNREGISTERED in found:
        return REVOKED
    return None if found else UNREGISTERED


def check_admission(
    address: str, authority: Path, key: "ec.EllipticCurvePrivateKey", connected: bool = False
) -> None:
    """Prove to the SuperLink that this site holds its key, within SECONDS.

    connected: whether this site's own SuperNode runs, so that one is expected to be connected.
    Raises StateError that says why the SuperLink would not let the site in, and what to do; Unreachable if it
    does not answer.
    """
    import grpc

    public = public_key_to_bytes(key.public_key())
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=NO_HEARTBEAT)
    with _channel(address, authority, key) as channel:
        try:
            FleetStub(channel).ActivateNode(request, timeout=SECONDS)
        except grpc.RpcError as failed:
            code, said = failed.code(), failed.details() or ""
        else:
            return
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise Unreachable(f"{address}: no answer about this site's key ({shown(said, 300)}).")
    refusal = FlowerError.from_json(said)
    if refusal is None and "timestamp" in said:
        raise StateError(f"{address}: {CLOCK}")
    if refusal is None:
        raise StateError(f"{address}: does not check this site's key as a SuperLink does: {shown(said, 300)}")
    found = refusal.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL
    if found and (refusal.public_details != CONNECTED or connected):
        return
    reason = refusal.public_details if refusal.public_details in REASONS else refusal.message
    raise StateError(f"{address}: {shown(reason, 600)}")


def sign_off(address: str, authority: Path, key: "ec.EllipticCurvePrivateKey", node: int) -> None:
    """Tell the SuperLink, within SECONDS, that a node of this key is gone; nothing where it knows already.

    node: Flower's id of it. Raises Unreachable when the SuperLink does not answer.
    """
    import grpc

    with _channel(address, authority, key) as channel:
        try:
            FleetStub(channel).DeactivateNode(DeactivateNodeRequest(node_id=node), timeout=SECONDS)
        except grpc.RpcError as failed:
            if failed.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                said = shown(failed.details() or "", 300)
                raise Unreachable(
                    f"{address}: no answer to the sign-off of an earlier SuperNode ({said})."
                ) from failed


def _channel(address: str, authority: Path, key: "ec.EllipticCurvePrivateKey") -> Any:
    """A channel whose requests are signed with a node's key, as those of its SuperNode."""
    signed = NodeAuthClientInterceptor(key, key.public_key())
    interceptors = [RuntimeVersionClientInterceptor("SuperNode"), signed]
    return create_channel(address, False, authority.read_bytes(), interceptors=interceptors)
