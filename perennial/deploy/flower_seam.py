"""Every private name of Flower 1.39 that Perennial uses, with its purpose and what would replace it.

Flower promises nothing about these names between releases, so no other file imports its private modules; a
test holds that. A name is imported when it is first asked for, because a site starts a process for every
message and pays for every import.
"""

# the aliases below mark names as re-exported, for type checkers
# ruff: noqa: F401, PLC0414

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from flwr.app.message import make_message as make_message
    from flwr.cli.build import build_fab_from_disk as build_fab_from_disk
    from flwr.cli.install import install_from_fab as install_from_fab
    from flwr.client.mod import secaggplus_mod as secaggplus_mod
    from flwr.common.constant import ErrorCode as ErrorCode
    from flwr.common.constant import Status as Status
    from flwr.common.serde import message_from_proto as message_from_proto
    from flwr.common.serde import message_to_proto as message_to_proto
    from flwr.common.serde import recorddict_from_proto as recorddict_from_proto
    from flwr.common.serde import recorddict_to_proto as recorddict_to_proto
    from flwr.common.serde_utils import metadata_from_proto as metadata_from_proto
    from flwr.common.serde_utils import metadata_to_proto as metadata_to_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.server import LegacyContext as LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow as SecAggPlusWorkflow
    from flwr.supercore import sql_mixin as sql_mixin
    from flwr.supercore.cli import flower_superexec as flower_superexec
    from flwr.supercore.constant import TaskType as TaskType
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree as iterate_object_tree
    from flwr.supercore.object_store import ObjectStore as ObjectStore
    from flwr.supercore.run import Run as Run
    from flwr.supercore.superexec.executor import LaunchResult as LaunchResult
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
    from flwr.superlink.cli import flower_superlink as flower_superlink
    from flwr.superlink.cli import flwr_serverapp as flwr_serverapp
    from flwr.supernode import start_client_internal as start_client_internal
    from flwr.supernode.cli import flower_supernode as flower_supernode
    from flwr.supernode.nodestate.in_memory_nodestate import (
        CLIENT_APP_CRASHED_ERROR as CLIENT_APP_CRASHED_ERROR,
    )

    legacy_types: ModuleType
    recorddict_compat: ModuleType
    from flwr.client.grpc_rere_client.node_auth_client_interceptor import (
        NodeAuthClientInterceptor as NodeAuthClientInterceptor,
    )
    from flwr.proto.fleet_pb2 import ActivateNodeRequest as ActivateNodeRequest
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest as DeactivateNodeRequest
    from flwr.proto.fleet_pb2_grpc import FleetStub as FleetStub
    from flwr.supercore.constant import NodeStatus as NodeStatus
    from flwr.supercore.error import ApiErrorCode as ApiErrorCode
    from flwr.supercore.error import FlowerError as FlowerError
    from flwr.supercore.grpc import create_channel as create_channel
    from flwr.supercore.interceptors import RuntimeVersionClientInterceptor as RuntimeVersionClientInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes as public_key_to_bytes

    fleet_message_handler: ModuleType
    http_grid: ModuleType
    run_clientapp_module: ModuleType
    run_superexec: ModuleType
    subprocess_executor: ModuleType
    supernode_heartbeat: ModuleType
    superlink_module: ModuleType


@dataclass(frozen=True)
class Private:
    """One private name. module, attribute: where it lies; attribute "" is the module itself.

    purpose: what Perennial does with it. successor: what would replace it.
    """

    module: str
    attribute: str
    purpose: str
    successor: str


_SERDE = "worker processes of the in-process engine exchange Flower's own serialised messages"
_PUBLIC_SERDE = "a public serialisation of Message"

_ASKS = "a site asks whether the SuperLink would let it in, without connecting"
_SAYS = "the SuperLink says why it lets a node not in"
_REASON = "a SuperNode that is told why it is not activated, and a check that does not activate it"
_LEAVES = "a SuperNode signs off for an earlier one of its site that was killed"
_BACK = "a SuperLink that lets the holder of a key take its own place back"
_FORKS = "a ClientApp is forked from a process that has its imports"
_WARM = "an executor of Flower that keeps ClientApps warm, as it has for other tasks in Kubernetes"
_YARDSTICK = "a benchmark runs Flower's own SecAgg+ beside ours"
_GOES = "nothing: the row goes"

PRIVATE = {
    "secaggplus_mod": Private("flwr.client.mod", "secaggplus_mod", _YARDSTICK, _GOES),
    "SecAggPlusWorkflow": Private("flwr.server.workflow", "SecAggPlusWorkflow", _YARDSTICK, _GOES),
    "LegacyContext": Private("flwr.server", "LegacyContext", _YARDSTICK, _GOES),
    "recorddict_compat": Private("flwr.compat.common.recorddict_compat", "", _YARDSTICK, _GOES),
    "legacy_types": Private("flwr.common", "", _YARDSTICK, _GOES),
    "TaskIdentity": Private(
        "flwr.supercore.task_identity",
        "TaskIdentity",
        "the in-process engine sets the identity without which no Message can be built",
        "a public way to build a Message outside Flower's runtimes",
    ),
    "Run": Private(
        "flwr.supercore.run", "Run", "the type that Grid.set_run takes", "a public name of the same type"
    ),
    "ErrorCode": Private(
        "flwr.common.constant",
        "ErrorCode",
        "an app that raises answers with the same code in process as at a SuperNode",
        "public error codes",
    ),
    "make_message": Private("flwr.app.message", "make_message", _SERDE, _PUBLIC_SERDE),
    "message_from_proto": Private("flwr.common.serde", "message_from_proto", _SERDE, _PUBLIC_SERDE),
    "message_to_proto": Private("flwr.common.serde", "message_to_proto", _SERDE, _PUBLIC_SERDE),
    "recorddict_from_proto": Private("flwr.common.serde", "recorddict_from_proto", _SERDE, _PUBLIC_SERDE),
    "recorddict_to_proto": Private("flwr.common.serde", "recorddict_to_proto", _SERDE, _PUBLIC_SERDE),
    "metadata_from_proto": Private("flwr.common.serde_utils", "metadata_from_proto", _SERDE, _PUBLIC_SERDE),
    "metadata_to_proto": Private("flwr.common.serde_utils", "metadata_to_proto", _SERDE, _PUBLIC_SERDE),
    "ProtoMessage": Private("flwr.proto.message_pb2", "Message", _SERDE, _PUBLIC_SERDE),
    "build_fab_from_disk": Private(
        "flwr.cli.build",
        "build_fab_from_disk",
        "the operator builds the bundle whose hash sites approve",
        "the command `flwr build`, which writes the same bytes to a file",
    ),
    "install_from_fab": Private(
        "flwr.cli.install",
        "install_from_fab",
        "a site unpacks an approved bundle where its SuperNode looks for it",
        "the command `flwr install`",
    ),
    "flower_superlink": Private(
        "flwr.superlink.cli",
        "flower_superlink",
        "the SuperLink runs in a process of ours, which changes what the entries below name",
        "the command `flower-superlink`",
    ),
    "superlink_module": Private(
        "flwr.superlink.cli.flower_superlink",
        "",
        "its SuperExec is watched: the SuperLink ends when it dies; its state says which sites are connected",
        "a SuperLink that ends, or reports itself unhealthy, without its SuperExec; a metric of its nodes",
    ),
    "sql_mixin": Private(
        "flwr.supercore.sql_mixin",
        "",
        "the SuperLink's database waits for a busy file",
        "a setting of the busy time-out",
    ),
    "flower_supernode": Private(
        "flwr.supernode.cli",
        "flower_supernode",
        "the SuperNode runs in a process of ours, which changes what the entries below name",
        "the command `flower-supernode`",
    ),
    "start_client_internal": Private(
        "flwr.supernode.start_client_internal",
        "",
        "replies are sent once they are whole, and the SuperExec is watched",
        "a SuperNode that survives a ClientApp killed while it replies, and ends without its SuperExec",
    ),
    "supernode_heartbeat": Private(
        "flwr.supercore.heartbeat",
        "",
        "a SuperNode beats often, so that the operator soon knows that it is silent",
        "a setting of how often a SuperNode beats, apart from when it counts as gone",
    ),
    "flower_superexec": Private(
        "flwr.supercore.cli",
        "flower_superexec",
        "a site's SuperExec runs in a process of ours, which changes what the entries below name",
        "the command `flower-superexec`",
    ),
    "run_superexec": Private(
        "flwr.supercore.superexec.run_superexec",
        "",
        "a site's SuperExec is woken by its SuperNode",
        "a SuperNode that hands a message on when it comes",
    ),
    "run_clientapp_module": Private("flwr.supernode.runtime.run_clientapp", "", _FORKS, _WARM),
    "flwr_serverapp": Private(
        "flwr.superlink.cli",
        "flwr_serverapp",
        "a ServerApp runs in a process of ours, which changes what the entry below names",
        "the command `flwr-serverapp`",
    ),
    "http_grid": Private(
        "flwr.superlink.grid.http_grid",
        "",
        "parts of a reply that are not there yet are asked for again sooner than after a second",
        "a setting of the first wait",
    ),
    "subprocess_executor": Private(
        "flwr.supercore.superexec.executor.subprocess_executor", "", _FORKS, _WARM
    ),
    "LaunchResult": Private("flwr.supercore.superexec.executor", "LaunchResult", _FORKS, _WARM),
    "TaskType": Private("flwr.supercore.constant", "TaskType", _FORKS, _WARM),
    "ActivateNodeRequest": Private("flwr.proto.fleet_pb2", "ActivateNodeRequest", _ASKS, _REASON),
    "DeactivateNodeRequest": Private("flwr.proto.fleet_pb2", "DeactivateNodeRequest", _LEAVES, _BACK),
    "FleetStub": Private("flwr.proto.fleet_pb2_grpc", "FleetStub", _ASKS, _REASON),
    "NodeAuthClientInterceptor": Private(
        "flwr.client.grpc_rere_client.node_auth_client_interceptor",
        "NodeAuthClientInterceptor",
        _ASKS,
        _REASON,
    ),
    "RuntimeVersionClientInterceptor": Private(
        "flwr.supercore.interceptors", "RuntimeVersionClientInterceptor", _ASKS, _REASON
    ),
    "create_channel": Private("flwr.supercore.grpc", "create_channel", _ASKS, _REASON),
    "public_key_to_bytes": Private(
        "flwr.supercore.primitives.asymmetric", "public_key_to_bytes", _ASKS, _REASON
    ),
    "ApiErrorCode": Private("flwr.supercore.error", "ApiErrorCode", _SAYS, _REASON),
    "FlowerError": Private("flwr.supercore.error", "FlowerError", _SAYS, _REASON),
    "NodeStatus": Private("flwr.supercore.constant", "NodeStatus", _SAYS, _REASON),
    "fleet_message_handler": Private(
        "flwr.server.superlink.fleet.message_handler.message_handler", "", _SAYS, _REASON
    ),
    "CLIENT_APP_CRASHED_ERROR": Private(
        "flwr.supernode.nodestate.in_memory_nodestate",
        "CLIENT_APP_CRASHED_ERROR",
        "the answer for a ClientApp that ended while it handed its reply over",
        "the same SuperNode",
    ),
    "Status": Private(
        "flwr.common.constant",
        "Status",
        "whether a ClientApp still hands its reply over",
        "the same SuperNode",
    ),
    "iterate_object_tree": Private(
        "flwr.supercore.inflatable.inflatable_object",
        "iterate_object_tree",
        "to know when a reply is whole",
        "the same SuperNode",
    ),
    "ObjectStore": Private(
        "flwr.supercore.object_store", "ObjectStore", "to know when a reply is whole", "the same SuperNode"
    ),
}


def plain_logs() -> None:
    """Give each line of Flower's log its time, and colours on a terminal alone. Import flwr before."""
    for handler in logging.getLogger("flwr").handlers:
        if hasattr(handler, "timestamps") and isinstance(handler, logging.StreamHandler):
            vars(handler).update(timestamps=True, colored=handler.stream.isatty())


def give_own(module: "ModuleType", imported: str, **names: Any) -> None:
    """Replace names of a module that another module has imported, for that other module alone.

    imported: what module calls it, `time` for instance.
    """
    original = vars(module)[imported]
    own = type(original)(original.__name__)
    vars(own).update(vars(original), **names)
    vars(module)[imported] = own


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    private = PRIVATE[name]
    module = import_module(private.module)
    found = globals()[name] = getattr(module, private.attribute) if private.attribute else module
    return found
