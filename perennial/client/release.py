"""The one exit of a site: every reply is built, charged and serialised here.

A handler gives each field a type (privacy/released.py). A protected release is charged before the data are
read (client/training_samples.py), so that whether a site answers costs as much as what it answers. `leave`
charges what was not, and builds the reply from copies. `serialise` lets out no reply that was built elsewhere
or changed afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import fields
from typing import Any, TypeVar

from flwr.app import RecordDict

from perennial.client.consent import require_consent
from perennial.client.identity import Identity
from perennial.client.time_limit import TIME_RULE
from perennial.foundation.errors import (
    KINDS,
    PerennialError,
    PolicyRefusal,
    PrivacyError,
    ProtocolError,
    RecordGone,
    clean_text,
)
from perennial.foundation.files import lock_folder
from perennial.foundation.site_log import log
from perennial.privacy.entries import Entry
from perennial.privacy.released import Mechanism, Public, Released
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import Refusal
from perennial.protocol.stamp import LONGEST_REASON, Stamp
from perennial.protocol.tensors import Tensors

Reply = TypeVar("Reply", bound=WireMessage)
T = TypeVar("T")
U = TypeVar("U")
_data_read: ContextVar[bool] = ContextVar("data_read", default=False)
_hidden: ContextVar[bool] = ContextVar("hidden", default=False)
"""Whether what the request in hand has computed since may follow from the data."""
REPLIES_IN = ("perennial.protocol.messages", "perennial.protocol.secure_messages")
AFTER_DATA = "no answer; the details are in this site's own log"
"""All that a site says of an error once the data were read for a protected release."""
TELLABLE = (PolicyRefusal, PrivacyError, ProtocolError, RecordGone)
"""Errors that speak of settings, messages and rounds only."""
_MARK, _RECORD = "_left_by_the_exit", "_as_it_left"
_EXIT = object()


class Paid(Released[T]):
    """A released value that the ledger was charged for; made by pay() and by what reads it from the disk."""

    def __init__(self, value: T, by: object = None) -> None:
        if by is not _EXIT:
            raise PrivacyError("a value counts as paid only once the exit has charged for it")
        self.value, self.mechanisms = value, ()

    def alike(self, value: U) -> "Paid[U]":
        """What was computed from this value alone, and not from the data again: it costs nothing more."""
        return Paid(value, _EXIT)


Typed = Public[Any] | Released[Any] | Paid[Any] | None


def leave(identity: Identity, request: WireMessage, kind: type[Reply], /, **typed: Typed) -> Reply:
    """The reply to a request, after the charge for all that it releases.

    Args:
        identity: of the site.
        request: whose stamp the reply repeats.
        kind: the reply's class.
        typed: its fields. Fields that name the same Mechanism leave for one charge. None: absent.

    Raises:
        PrivacyError: a field has no type, a private run would release it without noise, or the lifetime
            budget does not cover it. Nothing leaves then.
        StateError: the charge cannot be recorded.
    """
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = dict(request.stamp_fields) if issubclass(kind, Stamp) else {}  # pyright: ignore[reportAttributeAccessIssue]
    released: list[Released[Any]] = []
    for name, given in typed.items():
        if given is None:
            continue
        if type(given) not in (Public, Released, Paid) or name not in known:
            raise PrivacyError(
                f"{kind.__name__}.{name}: found a {type(given).__name__}; allowed: a field of the message "
                "that is Public or Released, so that its charge is known"
            )
        if isinstance(given, Released):
            released.append(given)
        elif name in kind.public:
            _check_number(identity, request, kind, name, given.value)
        else:
            raise PrivacyError(
                f"{kind.__name__}.{name}: found a public value, allowed a released one, because the field "
                "speaks of data"
            )
        values[name] = given.value
    if kind.__module__ not in REPLIES_IN:
        raise PrivacyError(f"{kind.__name__}: not of the protocol; what is public in it nobody has said")
    _charge(identity, released)
    if not (identity.deployed or identity.experiment.privacy.enabled):
        return let_out(kind(**values))  # sites of a cohort share one tensor
    # a record shares its tensors' memory, so what travels has a copy of its own
    travels, reply = (kind(**{name: _copy_value(value) for name, value in values.items()}) for _ in range(2))
    object.__setattr__(reply, _RECORD, travels.to_record())
    return let_out(reply)


def _copy_value(value: T) -> T:
    """A copy that nobody else holds: what was paid must not change before it is sent or stored."""
    if isinstance(value, Tensors):
        return Tensors({name: tensor.detach().clone() for name, tensor in value.items()})  # pyright: ignore[reportReturnType]
    return deepcopy(value)


def _check_number(identity: Identity, request: WireMessage, kind: type[Any], name: str, value: Any) -> None:
    """Raises PrivacyError where a public number of a private run is neither the request's nor a setting's.

    A count of the data looks like any other number.
    """
    experiment = identity.experiment
    if not experiment.privacy.enabled or not isinstance(value, int | float):
        return
    from perennial.config import charges  # PyTorch, which saying who it is spares a site

    steps = charges.price_update(experiment, "").entry.steps if experiment.privacy.mode == "sample" else 0
    settings = {
        "num_examples": 1,
        "steps": steps,
        "lends_digests": experiment.digests is None or "digest" in identity.policy.answers,
        "samples_per_digest": experiment.digests and experiment.digests.per_digest,
    }
    allowed = settings[name] if name in settings else getattr(request, name, None)
    if value != allowed:
        raise PrivacyError(
            f"{kind.__name__}.{name}: found a number that is not {allowed}, which request and settings give"
        )


def begin_request() -> None:
    """Note that a request begins, for which no data were read yet."""
    _data_read.set(False)
    _hidden.set(False)


def note_data_read(*, hidden: bool) -> None:
    """Note that what follows in this request may depend on the data. hidden: a refusal gives no reason."""
    _data_read.set(True)
    _hidden.set(hidden)


def has_read_data() -> bool:
    """Whether the request in hand has read data."""
    return _data_read.get()


@contextmanager
def contain_errors(what: str) -> Iterator[None]:
    """Run what stays at the site; an error is logged, because it must not decide the reply."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PolicyRefusal) and str(error).startswith(TIME_RULE):
            raise  # the alarm rings once
        log.exception("%s: failed; the reply does not depend on it", what)


def charge_first(identity: Identity, mechanism: Mechanism, noted: Entry | None = None) -> None:
    """Charge a deployed site for one release before it is computed. Errors as pay().

    noted: the mechanism's entry, with the name of its set of records. An error later gives nothing back.
    """
    if identity.deployed and mechanism.entry.protected:
        identity.ledger.charge(noted or mechanism.entry, identity.policy.limit)
        mechanism.paid.append(None)


def pay(identity: Identity, released: Released[T]) -> Paid[T]:
    """Charge for a value that is stored before it leaves. Errors as leave()."""
    _charge(identity, [released])
    return Paid(_copy_value(released.value), _EXIT)


def restore_paid(value: T) -> Paid[T]:
    """A value that was charged for, and is read from the site's own disk to leave unchanged once more."""
    return Paid(value, _EXIT)


def let_out(reply: Reply) -> Reply:
    """Mark a reply as built by the exit: in leave(), and where a kept reply is read back."""
    object.__setattr__(reply, _MARK, _read_fields(reply))
    return reply


def check_left(reply: WireMessage) -> None:
    """Raises PrivacyError for a reply that the exit did not build, or that was changed since."""
    typed, held = getattr(reply, _MARK, {}), _read_fields(reply)
    if not typed or any(held[name] is not typed[name] for name in held):
        raise PrivacyError(
            f"{type(reply).__name__}: not built by the exit (client/release.py), or changed since: fields "
            "have no type and no charge; nothing left the site"
        )


def _read_fields(reply: WireMessage) -> dict[str, Any]:
    """The reply's fields as they are."""
    return {field.name: getattr(reply, field.name) for field in fields(reply)}  # pyright: ignore[reportArgumentType]


def serialise(reply: WireMessage) -> RecordDict:
    """The record that travels. Raises PrivacyError as check_left() does."""
    check_left(reply)
    return getattr(reply, _RECORD, None) or reply.to_record()


def as_it_leaves(identity: Identity, request: WireMessage, reply: WireMessage) -> RecordDict:
    """The record that travels, if the hospital still agrees: it may have withdrawn while the site worked.

    Raises PolicyRefusal as require_consent() does, PrivacyError as check_left() does.
    """
    run = getattr(request, "run", "")
    if not identity.deployed or not run:
        return serialise(reply)
    with lock_folder(identity.state_dir):
        require_consent(identity.state_dir, run)
        return serialise(reply)


def build_refusal(site: str, error: Exception, *, deployed: bool) -> RecordDict:
    """A Refusal as it travels.

    A deployed site's data and disk errors can name files, and file names can name patients; an unforeseen
    error can hold values. Their text stays in the site's own log. Once the data were read for a protected
    release, every error gives the same refusal, kind and all.
    """
    kind = KINDS.get(type(error), "error")
    if deployed and _hidden.get():
        kind, said = "error", AFTER_DATA
    elif deployed and not isinstance(error, TELLABLE):
        name = type(error).__name__ if isinstance(error, PerennialError) else "error"
        said = f"{name}; the details are in this site's own log"
    else:
        said = str(error) if isinstance(error, PerennialError) else f"{type(error).__name__}: {error}"
    return Refusal(site=site, kind=kind, reason=clean_text(said, LONGEST_REASON - 100)).to_record()


def _charge(identity: Identity, released: list[Released[Any]]) -> None:
    """Charge each mechanism once that was not charged before the data were read.

    A simulated site without protection keeps no ledger, because nobody's data leaves.
    """
    private = identity.experiment.privacy.enabled
    demanded = private or identity.policy.require_privacy != "none"
    owed: dict[int, Mechanism] = {}
    for each in released:
        if type(each) is not Paid and not each.mechanisms:
            raise PrivacyError("a released value has no mechanism; nothing left the site")
        for mechanism in each.mechanisms:
            owed.setdefault(id(mechanism), mechanism)
    for mechanism in owed.values():
        if demanded and mechanism.in_the_clear:
            raise PrivacyError(
                f"privacy.mode {identity.experiment.privacy.mode}, policy.require_privacy "
                f"{identity.policy.require_privacy}: {mechanism.entry.kind} would leave without noise, which "
                "no accountant covers; nothing left the site"
            )
    if not private and not identity.deployed:
        owed = {key: mechanism for key, mechanism in owed.items() if not mechanism.in_the_clear}
    for mechanism in owed.values():
        if mechanism.paid:
            mechanism.paid.pop()
        else:
            identity.ledger.charge(mechanism.entry, identity.policy.limit)
