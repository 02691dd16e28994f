"""The ClientApp: one handler for each kind of request; a failure becomes a typed refusal.

The operator reads the reason in the refusal. A site starts one process for each message, so nothing is
imported here that a request may not need.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

import perennial
from perennial.client.activity import note_request
from perennial.client.consent import remove_withdrawn, require_consent
from perennial.client.identity import Identity, identify, use_plugins
from perennial.client.release import as_it_leaves, begin_request, build_refusal, leave
from perennial.client.time_limit import check_bytes
from perennial.foundation.errors import PerennialError, PolicyRefusal, ProtocolError, clean_text
from perennial.foundation.site_log import limit_subject, log, speak_of
from perennial.privacy.released import Public
from perennial.protocol.fields import WireMessage, read_kind
from perennial.protocol.messages import (
    REQUESTS,
    DescribeReply,
    DescribeRequest,
    EvaluateRequest,
    FinishTaskRequest,
    TrainRequest,
)
from perennial.protocol.secure_messages import IntroduceRequest, OpenRequest, ShareRequest, VoteRequest
from perennial.protocol.stack import is_parcel, open_parcel, pack_parcel
from perennial.protocol.stamp import VERSION, Stamp

Done = TypeVar("Done")
Handler = Callable[[Identity, Any], WireMessage]
"""What a site does for one kind of request, which it is given parsed."""

RAISED = 2
"""Flower's code for a ClientApp that could not answer (ErrorCode.CLIENT_APP_RAISED_EXCEPTION)."""


def answer_in_kind(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Open a request that came as a parcel, and send the reply to it as a parcel too."""
    if not message.has_content() or not is_parcel(message.content):
        return call_next(message, context)
    try:
        message.content = open_parcel(message.content)
    except ProtocolError as error:
        log.warning("refused: %s", error)
        return Message(Error(RAISED, str(error)), reply_to=message)
    reply = call_next(message, context)
    if reply.has_content():
        reply.content = pack_parcel(reply.content)
    return reply


app = ClientApp(mods=[answer_in_kind])


def _answer(
    message: Message,
    context: Context,
    expected: type[WireMessage],
    handle: Handler,
) -> Message:
    """Validate a request, handle it, and reply; any error becomes a Refusal.

    A strategy that is not ours knows no Refusal, and gets Flower's Error.
    """
    if not read_kind(message.content):
        reason = (
            f"this site runs Perennial and answers {expected.__name__}, but the message is of another app's "
            "strategy; start a strategy of perennial.strategies through Perennial's ServerApp"
        )
        log.warning("refused: %s", reason)
        return Message(Error(RAISED, reason), reply_to=message)

    def act(identity: Identity) -> Message:
        if identity.deployed:
            check_bytes(message.content)
        request = expected.from_record(message.content)
        facts = {"run": _run_name(identity, context), "round": getattr(request, "round", 0)}
        speak_of(site=identity.name, **facts)
        with _watch_request(identity, request, context):
            return Message(as_it_leaves(identity, request, handle(identity, request)), reply_to=message)

    return attempt(message, context, act)


def attempt(
    message: Message,
    context: Context,
    act: Callable[[Identity], Done],
    who: Callable[[Context], Identity] = identify,
) -> Done | Message:
    """Return act(identity) of the site that answers, or a Refusal message with the reason when act raises.

    message: the request, to which a Refusal replies. who: finds the site's identity from context. Catches
    every error.
    """
    site, deployed = "unknown", True
    begin_request()
    with limit_subject():
        try:
            identity = who(context)
            site, deployed = identity.name, identity.deployed
            speak_of(site=site)
            with use_plugins(identity, context):
                return act(identity)
        except PerennialError as error:
            log.warning("refused: %s", error)
            record = build_refusal(site, error, deployed=deployed)
        except Exception as error:
            log.exception("failed")
            record = build_refusal(site, error, deployed=deployed)
    return Message(record, reply_to=message)


@contextmanager
def _watch_request(identity: Identity, request: WireMessage, context: Context) -> Iterator[None]:
    """A deployed site notes what it was asked, and answers only what its hospital agrees to now.

    It always answers with its name, so that the operator knows which site pauses.
    """
    if not identity.deployed or isinstance(request, DescribeRequest):
        yield
        return
    run = getattr(request, "run", "")
    facts = {"run": run, "name": _run_name(identity, context), "round": getattr(request, "round", 0)}
    with note_request(identity.state_dir, type(request).__name__.removesuffix("Request").lower(), **facts):
        require_consent(identity.state_dir, run)
        try:
            yield
        finally:
            # what a request in work wrote after the hospital withdrew
            remove_withdrawn(identity.state_dir, run)


def _run_name(identity: Identity, context: Context) -> str:
    """The operator's name of the run."""
    return clean_text(str(context.run_config.get("name") or identity.experiment.name), 80)


def _of_sums(answer: str) -> Handler:
    """Answer by a function of client/secure_answers.py, which needs neither data nor a model."""

    def handle(identity: Identity, request: Stamp) -> WireMessage:
        from perennial.client.door import admit_request

        with admit_request(identity, request):
            return getattr(import_module("perennial.client.secure_answers"), answer)(identity, request)

    return handle


def _answer_at_site(find: Callable[[Any, type], Callable[[Any, Any], WireMessage]]) -> Handler:
    """Answer with the opened site. find: (site, kind of request) -> what answers, imported for it alone."""

    def handle(identity: Identity, request: Stamp) -> WireMessage:
        from perennial.client.policy import check_demand
        from perennial.client.site import open_site

        if not request.own_noise:
            check_demand(identity.policy, identity.experiment)
        site = open_site(identity, request)
        if not (identity.deployed or site.experiment.privacy.enabled):
            return find(site, type(request))(site, request)
        from perennial.client.door import admit_request
        from perennial.client.kept_reply import answer_once
        from perennial.client.training_samples import require_exemplars

        def answer_request() -> WireMessage:
            with admit_request(identity, request):
                require_exemplars(site, request)
                return find(site, type(request))(site, request)

        return answer_once(site, request, answer_request)

    return handle


def _own(answer: str) -> Handler:
    """Answer by a function of client/handlers.py."""
    return _answer_at_site(lambda *_: getattr(import_module("perennial.client.handlers"), answer))


def _find_half(site: Any, kind: type) -> Callable[[Any, Any], WireMessage]:
    """What answers a request of a method: the site half that the approved experiment names."""
    from perennial.learning.site_method import SiteMethods

    found = SiteMethods.planned(site.experiment).answer_to(kind)
    if found is None:
        raise PolicyRefusal(f"{kind.__name__}: the approved experiment's strategy does not ask for it")
    return found


def _describe(identity: Identity, request: DescribeRequest) -> DescribeReply:
    if request.version != VERSION:
        raise ProtocolError(
            f"{identity.name!r} (Perennial {perennial.__version__}) speaks protocol version {VERSION}, "
            f"this server {request.version}: install the same release at both"
        )
    experiment, signed = identity.experiment, {}
    if not (experiment.strategy.trains or experiment.privacy.enabled or experiment.secure is not None):
        from perennial.client.secure_state import own_signer

        signer = own_signer(identity)
        signed = {"signing_key": Public(signer.key), "certified": Public(signer.certified)}
    return leave(
        identity,
        request,
        DescribeReply,
        version=Public(VERSION),
        site=Public(identity.name),
        experiment=Public(experiment.digest),
        answers=Public(list(identity.policy.answers)),
        require_privacy=Public(identity.policy.require_privacy),
        **signed,
    )


HANDLERS: dict[type[WireMessage], Handler] = {
    DescribeRequest: _describe,
    TrainRequest: _own("answer_train"),
    FinishTaskRequest: _own("answer_finish_task"),
    EvaluateRequest: _own("answer_evaluate"),
    IntroduceRequest: _of_sums("answer_introduce"),
    ShareRequest: _of_sums("answer_share"),
    VoteRequest: _of_sums("answer_vote"),
    OpenRequest: _of_sums("answer_open"),
}
"""Every request that a site answers, whatever the method."""
HANDLERS |= {kind: _answer_at_site(_find_half) for kind in REQUESTS if kind not in HANDLERS}

for _request, _handle in HANDLERS.items():
    _category, _, _action = _request.message_type.partition(".")
    getattr(app, _category)(*([_action] if _action else []))(
        partial(_answer, expected=_request, handle=_handle)
    )
