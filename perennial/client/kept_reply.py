"""What a site released in its latest round, kept so that the same question gets the same bytes.

A server that was killed, or that found too few answers, asks again. A second answer would be a second release
and would be paid for; the first one again tells nothing more, so it costs nothing and is not counted. It goes
out only to the same request under the same policy: run, round, model and settings are in the key. Masked
answers are not kept: a new attempt has new masks. A site that lost what it kept answers, and pays, anew.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from perennial.client.consent import exclude_withdrawal
from perennial.client.release import let_out
from perennial.client.site import Site
from perennial.client.state import read_safetensors
from perennial.foundation.errors import PerennialError
from perennial.foundation.files import lock_folder, make_folder, replace_file
from perennial.foundation.site_log import log
from perennial.foundation.tensor_file import yield_pieces
from perennial.protocol import messages
from perennial.protocol.fields import WireMessage
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors, hash_tensors

FOLDER = "released"
"""In a run's folder at a site: one file for each reply of the round."""
TURNS = "turns"
"""Beside the runs at a site: whose turn it is to answer."""
DELIVERED = ("previous_arrays",)
"""What a request brings along, or not, without asking for anything else."""


def answer_once(site: Site, request: Stamp, answer: Callable[[], WireMessage]) -> WireMessage:
    """The kept reply to this request, if there is one; otherwise answer(), kept if it charged the ledger.

    Waits for other processes that answer requests of this run: a server that was killed may ask again early.
    """
    kept = KeptReply.of(site, request)
    if kept is None:
        return answer()
    with kept.turn():
        if (found := kept.read()) is not None:
            return found
        before = site.identity.ledger.mark()
        reply = answer()
        if site.identity.ledger.mark() != before:
            kept.keep(reply)
        return reply


class KeptReply:
    """The file in which the reply to one request is kept."""

    def __init__(self, site: Site, request: Stamp) -> None:
        self._state, self._round = site.state(request.run), request.round
        self._folder = self._state.folder / FOLDER
        # outside the run's folder, where the door takes a turn within this one, and where nothing may lie
        # before the quota was asked; one of 256, so that a server's many runs leave no more
        self._state_dir = site.identity.state_dir
        self._turns = self._state_dir / TURNS / hashlib.sha256(request.run.encode()).hexdigest()[:2]
        policy = site.identity.policy.model_dump_json()
        self._key = hashlib.sha256(f"{_describe_request(request)}{policy}".encode()).hexdigest()

    @classmethod
    def of(cls, site: Site, request: Stamp) -> "KeptReply | None":
        """The request's kept reply; None if nothing is charged, it is masked, or it is kept elsewhere."""
        charged = site.identity.deployed or site.experiment.privacy.enabled
        masked = getattr(request, "attempt", None) is not None
        return None if masked or not charged or request.own_record else cls(site, request)

    def turn(self) -> AbstractContextManager[None]:
        """Context manager: wait until no other process of this site answers a request of this run."""
        make_folder(self._turns)
        return lock_folder(self._turns)

    @property
    def path(self) -> Path:
        return self._folder / f"{self._round:08d}-{self._key[:32]}.safetensors"

    def read(self) -> WireMessage | None:
        """The reply; None where none is kept, or one that a power cut has damaged."""
        if not self.path.exists():
            return None
        try:
            tensors, metadata = read_safetensors(self.path)
            content = json.loads(metadata["facts"])
            if content["key"] != self._key or content["sha256"] != _hash_reply(tensors, content["fields"]):
                return None
            values: dict[str, Any] = dict(content["fields"])
            for name, keys in content["tensors"].items():
                values[name] = Tensors({key: tensors[f"{name}/{key}"] for key in keys})
            return let_out(getattr(messages, content["kind"])(**values))
        except (PerennialError, KeyError, ValueError, TypeError) as error:
            log.warning("%s: not used (%s); the request is answered anew", self.path, error)
            return None

    def keep(self, reply: WireMessage) -> None:
        """Keep a reply before it leaves, and forget those of other rounds; without room it leaves unkept."""
        tensors, values, named = {}, {}, dict[str, list[str]]()
        for field in fields(cast(Any, reply)):
            value = getattr(reply, field.name)
            if isinstance(value, Tensors):
                named[field.name] = list(value)
                tensors |= {f"{field.name}/{key}": tensor for key, tensor in value.items()}
            else:
                values[field.name] = value
        content = {"key": self._key, "kind": type(reply).__name__, "fields": values, "tensors": named}
        try:
            # as it is read back: a tuple becomes a list
            content["sha256"] = _hash_reply(tensors, json.loads(json.dumps(values)))
            data = list(yield_pieces(tensors, {"facts": json.dumps(content)}))
            with exclude_withdrawal(self._state_dir, self._state.folder.name):
                if self._state.quota is not None:
                    self._state.quota.require(self._state.folder, sum(map(len, data)))
                make_folder(self._folder)
                replace_file(self.path, data, durable=False)
            for old in self._folder.glob("*.safetensors"):
                if not old.name.startswith(f"{self._round:08d}-"):
                    old.unlink(missing_ok=True)
        except (PerennialError, OSError) as error:
            log.warning("%s: not kept (%s); if it is asked for again, it is paid for again", self.path, error)


def _describe_request(request: Stamp) -> str:
    """What a request asks, as text: its fields, with tensors by their hash."""
    found: dict[str, Any] = {"kind": type(request).__name__}
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in DELIVERED:
            found[field.name] = _describe_tensors(value) if isinstance(value, Tensors) else value
    return json.dumps(found, sort_keys=True)


def _describe_tensors(tensors: Tensors) -> list[object]:
    return [hash_tensors(tensors), [[name, list(tensors[name].shape)] for name in sorted(tensors)]]


def _hash_reply(tensors: dict[str, Any], values: dict[str, Any]) -> str:
    text = f"{hash_tensors(tensors)}{json.dumps(values, sort_keys=True)}"
    return hashlib.sha256(text.encode()).hexdigest()
