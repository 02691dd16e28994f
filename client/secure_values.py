"""Masks a site's values for a sum, once for each attempt, and stores them before they leave."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from perennial.client.policy import check_secure
from perennial.client.secure_answers import secure_state
from perennial.client.site import Site
from perennial.foundation.errors import ProtocolError
from perennial.privacy.secure.masks import Words
from perennial.privacy.secure.roster import Member, Subject
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.stamp import Maskable
from perennial.protocol.tensors import Tensors

SIGNED = {np.dtype(np.uint64): np.int64, np.dtype(np.uint32): np.int32}
"""What words travel as: the wire's types are signed."""


def is_secure(site: Site, request: Maskable) -> bool:
    """Whether the answer goes into a masked sum.

    Raises ProtocolError when the request and the experiment do not agree: a server must not get in the clear
    what the experiment says is masked.
    """
    secure = site.experiment.secure
    if (secure is None) != (request.attempt is None):
        raise ProtocolError(
            f"{type(request).__name__}: attempt: found {request.attempt}; allowed: a number exactly when the "
            "experiment has `secure`"
        )
    return secure is not None


def masked_reply(
    site: Site,
    request: Maskable,
    statistic: str,
    about: str,
    words: Callable[[], Words],
    *,
    closes: Sequence[str] = (),
    kept: str = "",
) -> MaskedReply:
    """The reply with this site's words under masks.

    It is the one way of integers of any kind into a masked sum; the server's is MaskedSums.collect().

    statistic: what they are, one word. about: SHA-256 of what they are about. words: makes them, (N,) uint64
    or uint32; not called when this attempt was answered before, for then the same masked words leave again.
    closes: what else tells the same of the site, by any words: once this sum is opened, it goes into no
    other one, and before that it must be in none; () stands for `about`. kept: hash of the model that the
    site keeps as the teacher. Raises PolicyRefusal when the roster is too small for the site, the
    value was opened before, or the attempt is over.
    """
    secure, state = secure_state(site.identity, request)
    assert request.attempt is not None
    number, roster = request.attempt, request.roster or []
    check_secure(site.identity.policy, site.experiment, sites=len(roster))
    subject = Subject(request.round, statistic, about)
    with state.one_at_a_time():
        session = state.session(number)
        if session is None or session.attempt.task != request.task:
            raise ProtocolError(f"secure: this site has prepared no masks for attempt {number}")
        session.enrol(subject, _members(request))
        session.closes = list(closes) or [about]
        if session.stage == "prepared" and state.has_sent(number):
            # killed between the two writes below
            session.advance("masked")
        if session.stage == "prepared":
            state.check_new(number)
            state.check_closed(session.attempt, statistic, session.closes)
            values = np.ascontiguousarray(words())
            if secure.masks:
                session.mask(values)
            else:
                session.advance("masked")
            state.keep_sent(number, values)
        state.keep(session)
        sent = state.sent(number)
    tensor = torch.from_numpy(sent.view(SIGNED[sent.dtype]).copy())
    return MaskedReply(**request.stamp_fields, attempt=number, words=Tensors(words=tensor), model=kept)


def _members(request: Maskable) -> list[Member]:
    columns = (
        request.roster or [],
        request.roster_masks or [],
        request.roster_commitments or [],
        request.roster_signatures or [],
    )
    if len({len(column) for column in columns}) != 1:
        raise ProtocolError(f"{type(request).__name__}: roster: lists of different lengths")
    return [Member(*each) for each in zip(*columns, strict=True)]
