"""Simulated sites of one process that answer their requests of a round together: training in one pass.

Everything else is as for one site: each opens its turn, and each releases its own update.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from torch import Tensor

from perennial.client.app import attempt
from perennial.client.identity import Identity
from perennial.client.kept_reply import answered_once
from perennial.client.site import open_site
from perennial.client.training_turn import TrainingTurn
from perennial.foundation.site_log import log
from perennial.learning.cohort_training import Member, MemberResult, train_cohort
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainReply, TrainRequest


@dataclass(frozen=True)
class Waiting:
    """A turn whose site waits for the others. start: (P,), the model received. member: None trains alone."""

    message: Message
    context: Context
    turn: TrainingTurn
    start: Tensor
    member: Member | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Turns of one kind can train in one pass."""
        turn = self.turn
        own = self.name if self.member is None else self.member.kind
        return turn.model, turn.teacher, turn.request.task, turn.request.progress, own

    @property
    def name(self) -> str:
        """Tells this turn from the others."""
        return self.message.metadata.message_id

    def reply(self, result: MemberResult | None) -> Message:
        """The site's reply to its result; None: it trains alone first."""

        def act(_: Identity) -> Message:
            def answer() -> TrainReply:
                self.turn.resume(self.start if result is None else result.end)
                return self.turn.taken() if result is None else self.turn.reply(result)

            return self._message(answered_once(self.turn.site, self.turn.request, answer))

        return attempt(self.message, self.context, act, self.turn.site.identity)

    def _message(self, reply: WireMessage) -> Message:
        return Message(reply.to_record(), reply_to=self.message)


def answer_together(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
    """The replies to requests of one round of training, in their order. contexts: of their sites.

    A site that cannot take part answers why; the others train without it.
    """
    read = _Requests()
    opened = [_open(message, context, read) for message, context in zip(messages, contexts, strict=True)]
    waiting = [each for each in opened if isinstance(each, Waiting)]
    results: dict[str, MemberResult | None] = {}
    for group in _by_kind(waiting):
        for each, result in zip(group, _trained(group), strict=True):
            results[each.name] = result
    return [each.reply(results[each.name]) if isinstance(each, Waiting) else each for each in opened]


class _Requests:
    """Requests by their record, which the sites of a round share: each is read once."""

    def __init__(self) -> None:
        self._last: tuple[RecordDict, TrainRequest] | None = None

    def of(self, record: RecordDict) -> TrainRequest:
        """Raises ProtocolError, for each site anew, where the record is no request for training."""
        if self._last is None or self._last[0] != record:
            self._last = record, TrainRequest.from_record(record)
        return self._last[1]


def _open(message: Message, context: Context, read: _Requests) -> Waiting | Message:
    def act(identity: Identity) -> Waiting:
        request = read.of(message.content)
        turn = TrainingTurn.open(open_site(identity, request), request)
        start = turn.flat.vector.clone()
        return Waiting(message, context, turn, start, turn.training().as_member(start))

    return attempt(message, context, act)


def _by_kind(waiting: Iterable[Waiting]) -> list[list[Waiting]]:
    groups: dict[tuple[object, ...], list[Waiting]] = {}
    for each in waiting:
        groups.setdefault(each.kind, []).append(each)
    return list(groups.values())


def _trained(group: Sequence[Waiting]) -> Sequence[MemberResult | None]:
    """Results of sites of one kind; None for all where they must train one after the other."""
    members = [each.member for each in group if each.member is not None]
    if len(members) < 2:
        return [None] * len(group)
    turn = group[0].turn
    experiment = turn.site.experiment
    try:
        return train_cohort(
            experiment.learner,
            turn.model,
            turn.flat,
            members,
            teacher=turn.teacher,
            augmentation=experiment.data.augmentation,
            progress=turn.request.progress,
            first_class=turn.site.task_range(turn.request).start,
            steps=turn.site.steps(),
        )
    except Exception as error:
        # one site's fault must not cost the others their round: trained alone, only that site fails
        names = ", ".join(each.turn.site.name for each in group)
        log.warning("%s: trained one after the other (%s: %s)", names, type(error).__name__, error)
        return [None] * len(group)
