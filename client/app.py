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
    EvaluateRequest,
    FinishTaskRequest,
    Refusal,
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


def _answer(
    message: Message,
    context: Context,
    expected: type[Request],
    handle: Callable[[Identity, Request], WireMessage],
) -> Message:
    """Validate, handle, reply; any error becomes a Refusal. Samples and paths of the site never enter a
    reason."""
    site = "unknown"
    try:
        identity = identify(context)
        site = identity.name
        reply: WireMessage = handle(identity, expected.from_record(message.content))
    except PerennialError as error:
        log.warning("refused: %s", error)
        reply = Refusal(site=site, kind=KINDS.get(type(error), "error"), reason=str(error))
    except Exception as error:
        log.exception("failed")
        reply = Refusal(site=site, kind="error", reason=f"{type(error).__name__}: {error}")
    return Message(reply.to_record(), reply_to=message)


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
