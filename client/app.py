"""The ClientApp: one handler for each kind of request. A failure becomes a typed refusal, so the operator
reads the reason.

A site starts one process for each message, so nothing is imported here that a request may not need.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.identity import Identity, identify
from foundation.errors import (
    ConfigError,
    DataError,
    PerennialError,
    PolicyRefusal,
    PrivacyError,
    ProtocolError,
    StateError,
)
from protocol.fields import WireMessage
from protocol.messages import (
    VERSION,
    DescribeReply,
    DescribeRequest,
    DigestRequest,
    EvaluateRequest,
    FinishTaskRequest,
    PersonalModelRequest,
    Refusal,
    SparsityRequest,
    TrainRequest,
)

app = ClientApp()
log = logging.getLogger("perennial.site")
Request = TypeVar("Request", bound=WireMessage)

KINDS: dict[type[PerennialError], str] = {
    PolicyRefusal: "policy",
    PrivacyError: "privacy",
    DataError: "data",
    StateError: "state",
    ProtocolError: "protocol",
    ConfigError: "config",
}
TELLABLE = ("policy", "privacy", "protocol")
"""Kinds whose reasons speak of settings and messages only."""


def _answer(
    message: Message,
    context: Context,
    expected: type[Request],
    handle: Callable[[Identity, Request], WireMessage],
) -> Message:
    """Validate, handle, reply; any error becomes a Refusal."""
    site, deployed = "unknown", True
    try:
        identity = identify(context)
        site, deployed = identity.name, identity.deployed
        record = handle(identity, expected.from_record(message.content)).to_record()
    except PerennialError as error:
        log.warning("refused: %s", error)
        kind = KINDS.get(type(error), "error")
        record = Refusal(site=site, kind=kind, reason=_reason(error, kind, deployed)).to_record()
    except Exception as error:
        log.exception("failed")
        record = Refusal(site=site, kind="error", reason=_reason(error, "error", deployed)).to_record()
    return Message(record, reply_to=message)


def _reason(error: Exception, kind: str, deployed: bool) -> str:
    """What the operator reads. A real site's data and disk errors can name files, and file names can name
    patients."""
    if deployed and kind not in TELLABLE:
        return f"{type(error).__name__}; the details are in this site's own log"
    return str(error) if isinstance(error, PerennialError) else f"{type(error).__name__}: {error}"


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Who this site is."""

    def handle(identity: Identity, request: DescribeRequest) -> DescribeReply:
        return DescribeReply(
            version=VERSION,
            site=identity.name,
            experiment=identity.experiment.digest,
            answers=list(identity.policy.answers),
            require_privacy=identity.policy.require_privacy,
        )

    return _answer(message, context, DescribeRequest, handle)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this task's data."""

    def handle(identity: Identity, request: TrainRequest) -> WireMessage:
        from client.handlers import answer_train
        from client.site import open_site

        return answer_train(open_site(identity), request)

    return _answer(message, context, TrainRequest, handle)


@app.train("finish_task")
def finish_task(message: Message, context: Context) -> Message:
    """Choose exemplars and keep the task's model."""

    def handle(identity: Identity, request: FinishTaskRequest) -> WireMessage:
        from client.handlers import answer_finish_task
        from client.site import open_site

        return answer_finish_task(open_site(identity), request)

    return _answer(message, context, FinishTaskRequest, handle)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the model on held-out samples."""

    def handle(identity: Identity, request: EvaluateRequest) -> WireMessage:
        from client.handlers import answer_evaluate
        from client.site import open_site

        return answer_evaluate(open_site(identity), request)

    return _answer(message, context, EvaluateRequest, handle)


@app.query("digest")
def digest(message: Message, context: Context) -> Message:
    """Lend digests of this task's new data."""

    def handle(identity: Identity, request: DigestRequest) -> WireMessage:
        from client.digests import answer_digest
        from client.site import open_site

        return answer_digest(open_site(identity), request)

    return _answer(message, context, DigestRequest, handle)


@app.query("sparsity")
def sparsity(message: Message, context: Context) -> Message:
    """Measure how often each channel is silent."""

    def handle(identity: Identity, request: SparsityRequest) -> WireMessage:
        from client.site import open_site
        from client.sparsity import answer_sparsity

        return answer_sparsity(open_site(identity), request)

    return _answer(message, context, SparsityRequest, handle)


@app.train("personal_model")
def personal_model(message: Message, context: Context) -> Message:
    """Keep, and measure, the site's own model."""

    def handle(identity: Identity, request: PersonalModelRequest) -> WireMessage:
        from client.own_model import answer_personal_model
        from client.site import open_site

        return answer_personal_model(open_site(identity), request)

    return _answer(message, context, PersonalModelRequest, handle)
