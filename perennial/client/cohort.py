"""Simulated sites of one process that answer their requests of a round together: one turn for a cohort.

What the sites share is read, checked and loaded once: the request, the model, the experiment. What a site is
by itself stays its own: its samples and streams, its state, its refusal, its ledger, its kept reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from torch import Tensor

from perennial.client.app import attempt
from perennial.client.identity import Identity, identify
from perennial.client.kept_reply import answer_once
from perennial.client.release import check_left, serialise
from perennial.client.site import Site, open_site
from perennial.client.training_turn import TrainingTurn
from perennial.foundation.site_log import log
from perennial.learning.cohort_training import Member, MemberResult, train_cohort
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainReply, TrainRequest
from perennial.protocol.stack import Stack


@dataclass(frozen=True)
class Waiting:
    """An opened training turn of a site that waits until the whole cohort can train.

    start: (P,), the model received. member: its part of the cohort's training; None: it has to train alone.
    """

    message: Message
    context: Context
    turn: TrainingTurn
    start: Tensor
    member: Member | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of the turns that can train in one pass: those with equal keys."""
        turn = self.turn
        own = self.turn.site.identity.name if self.member is None else self.member.kind
        return turn.model, turn.teacher, turn.request.task, turn.progress, own

    def reply(self, result: MemberResult | None) -> WireMessage | Message:
        """The site's reply after training, or its Refusal. result None: train this site alone first."""

        def act(_: Identity) -> WireMessage:
            def answer() -> TrainReply:
                self.turn.resume(self.start if result is None else result.end)
                return self.turn.train_and_reply() if result is None else self.turn.reply(result)

            return answer_once(self.turn.site, self.turn.request, answer)

        return attempt(self.message, self.context, act, lambda _: self.turn.site.identity)


def answer_together(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
    """The replies to training requests of one round, each from the site at the same index of contexts.

    Sites that trained in one pass share one reply message (a Stack). A site that cannot take part sends a
    Refusal; the others train without it.
    """
    door = _Door()
    opened = [door.open(message, context) for message, context in zip(messages, contexts, strict=True)]
    replies = [each for each in opened if isinstance(each, Message)]
    groups: dict[tuple[object, ...], list[Waiting]] = {}
    for each in opened:
        if isinstance(each, Waiting):
            groups.setdefault(each.kind, []).append(each)
    for group in groups.values():
        results = _train_group(group)
        said = [each.reply(result) for each, result in zip(group, results, strict=True)]
        replies += _bundle_replies([each.message for each in group], said, results[0])
    return replies


def _bundle_replies(
    requests: Sequence[Message], said: Sequence[WireMessage | Message], first: MemberResult | None
) -> list[Message]:
    """The messages of sites that trained in one pass: one for all that release their row and nothing beside.

    first: the result of the first site; None where none trained.
    """
    apart: list[Message] = []
    places: dict[int, TrainReply] = {}
    for place, (request, each) in enumerate(zip(requests, said, strict=True)):
        if isinstance(each, Message):
            apart.append(each)
            continue
        check_left(each)
        if isinstance(each, TrainReply) and first is not None and _is_row(each, first.rows[place]):
            places[place] = each
        else:
            apart.append(Message(serialise(each), reply_to=request))
    if first is None or not places:
        return apart
    rows = first.rows if len(places) == len(first.rows) else first.rows[[*places]]
    stack = Stack([requests[place] for place in places], [*places.values()], rows)
    return [Message(stack, reply_to=stack.requests[0]), *apart]


def _is_row(reply: TrainReply, row: Tensor) -> bool:
    """Whether the update lies in the row, tensor after tensor, and is all that the reply holds."""
    at = row.data_ptr()
    for tensor in reply.update.values():
        if tensor.data_ptr() != at:
            return False
        at += tensor.nbytes
    return at == row.data_ptr() + row.nbytes


class _Door:
    """Opens the turns of a cohort; what sites share is read with the first of them."""

    def __init__(self) -> None:
        self._record: RecordDict | None = None
        self._request: TrainRequest | None = None
        self._before: Waiting | None = None

    def open(self, message: Message, context: Context) -> Waiting | Message:
        def act(identity: Identity) -> Waiting:
            request, again = self._read(message.content)
            if before is None or not again:
                turn = TrainingTurn.open(open_site(identity, request), request)
                start = turn.flat.vector.clone()
            else:
                turn = TrainingTurn.open(Site(identity, before.turn.site.process), request, before.turn)
                same = _locate_tensors(turn) == _locate_tensors(before.turn)
                start = before.start if same else turn.flat.vector.clone()
            self._before = Waiting(message, context, turn, start, turn.as_member(start))
            return self._before

        before = self._before
        beside = None if before is None else before.context
        return attempt(message, context, act, lambda own: identify(own, beside))

    def _read(self, record: RecordDict) -> tuple[TrainRequest, bool]:
        """(the request, whether the last turn that was opened has the same one).

        Raises ProtocolError, for each site anew, where the record is no request for training.
        """
        if self._request is None or self._record != record:
            self._record, self._request = record, TrainRequest.from_record(record)
            self._before = None
        return self._request, self._before is not None


def _locate_tensors(turn: TrainingTurn) -> list[int]:
    """Where in memory the model lies that a turn received."""
    return [tensor.data_ptr() for tensor in turn.start.values()]


def _train_group(group: Sequence[Waiting]) -> Sequence[MemberResult | None]:
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
            progress=turn.progress,
            first_class=turn.site.find_task_range(turn.request).start,
            steps=turn.site.steps(),
        )
    except Exception as error:
        # one site's fault must not cost the others their round: trained alone, only that site fails
        names = ", ".join(each.turn.site.name for each in group)
        log.warning("%s: trained one after the other (%s: %s)", names, type(error).__name__, error)
        return [None] * len(group)
