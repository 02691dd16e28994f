"""Masks a site's values for a sum, once for each attempt, and stores them before they leave."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from perennial.client.policy import check_secure
from perennial.client.release import Typed, leave, pay, restore_paid
from perennial.client.site import Site
from perennial.foundation.errors import ProtocolError
from perennial.models.sum_grid import LARGEST_NORM
from perennial.privacy.noise import Noise
from perennial.privacy.protection import clip_tensors
from perennial.privacy.released import Public, Released
from perennial.privacy.secure.keys import Words
from perennial.protocol.messages import TrainRequest
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.stamp import Maskable
from perennial.protocol.tensors import Tensors

if TYPE_CHECKING:
    from perennial.privacy.secure.roster import Member


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


def build_masked_reply(
    site: Site,
    request: Maskable,
    statistic: str,
    about: str,
    words: Callable[[], Released[Words]],
    *,
    closes: Sequence[str] = (),
    kept: str = "",
) -> MaskedReply:
    """The reply with this site's integers under masks, kept so that the same reply leaves if asked again.

    All integers enter masked sums here; MaskedSums.collect() is the server's side.
    statistic: one word for what they are. about: SHA-256 of what they describe, such as the model. words:
    computes them, (N,) uint64, and they are charged before they are kept; not called if this
    attempt was answered before. closes: names of the facts that they tell of this site; once a sum is
    opened, no value about the same names is put into one of other sites. () stands for `about`. kept: hash of
    the model that the site keeps as the teacher.
    Raises PolicyRefusal when the roster is too small for the site, the value was opened before, or the
    attempt is over; ProtocolError when this site has prepared no masks for it.
    """
    from perennial.client.secure_answers import open_secure_state
    from perennial.privacy.secure.roster import Subject

    secure, state = open_secure_state(site.identity, request)
    assert request.attempt is not None
    number, roster = request.attempt, request.roster or []
    check_secure(site.identity.policy, site.experiment, sites=len(roster))
    subject = Subject(request.round, statistic, about)
    with state.lock_attempts():
        session = state.load_session(number)
        if session is None or session.attempt.task != request.task:
            raise ProtocolError(f"secure: this site has prepared no masks for attempt {number}")
        session.enrol(subject, _list_members(request))
        session.closes = list(closes) or [about]
        if session.stage == "prepared" and state.has_sent(number):
            # killed between the two writes below
            session.advance("masked")
        if session.stage == "prepared":
            state.check_new(number)
            state.check_closed(session.attempt, statistic, session.closes, roster)
            values = np.ascontiguousarray(pay(site.identity, words()).value)
            if secure.masks:
                session.mask(values)
            else:
                session.advance("masked")
            state.note_masked(session.attempt, statistic, session.closes, roster)
            state.keep_sent(number, values)
        state.keep(session)
        sent = state.read_sent(number)
    tensor = torch.from_numpy(sent.view(np.int64).copy())
    return leave(
        site.identity,
        request,
        MaskedReply,
        attempt=Public(number),
        words=restore_paid(Tensors(words=tensor)),
        model=Public(kept),
    )


def _list_members(request: Maskable) -> "list[Member]":
    from perennial.client.secure_answers import align_columns
    from perennial.privacy.secure.roster import Member

    columns = (request.roster, request.roster_masks, request.roster_commitments, request.roster_signatures)
    return [Member(*each) for each in align_columns(*(column or [] for column in columns))]


def update_words(site: Site, request: TrainRequest, typed: Mapping[str, Typed]) -> Released[Words]:
    """An update and its weight as integers for a masked sum, with this site's share of the noise.

    Clips the update to LARGEST_NORM, because the server cannot check single updates.
    """
    from perennial.config.secure_words import UpdateWords

    update, examples = typed["update"], typed["num_examples"]
    assert isinstance(update, Released) and examples is not None
    layout = UpdateWords(site.experiment, request.sum_updates)
    weight = layout.weight(examples.value)
    # one that is not finite becomes zero: whether a record makes it so must not show
    clip_tensors(update.value.values(), LARGEST_NORM)
    words = layout.encode(update.value, weight)
    if (noise := layout.noise) is not None:
        for mechanism in update.mechanisms:
            mechanism.require(noise.whole)
        noise.add(words, Noise())
    return update.alike(words)
