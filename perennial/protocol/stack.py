"""The replies of simulated sites that trained in one pass: one matrix, and what each site says beside it.

It moves inside this machine alone. The engine makes it, and nobody else can: what comes from a network is a
RecordDict of Flower's own making.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict

from perennial.protocol.messages import TrainReply

if TYPE_CHECKING:
    from torch import Tensor


class Stack(RecordDict):
    """The content of one message that replies to K requests of one round.

    requests: the K messages. replies: one for each, with one stamp; they hold no tensors but the update.
    rows: (K, P); each update's tensors are views of its row, in order and without gaps.
    """

    def __init__(self, requests: Sequence[Message], replies: Sequence[TrainReply], rows: "Tensor") -> None:
        super().__init__()
        self.requests, self.replies, self.rows = requests, replies, rows

    @cached_property
    def norms(self) -> list[float]:
        """L2 norm of each update, to the bits of `Tensors.norm`; not finite where a value is not."""
        import torch

        sizes = [tensor.numel() for tensor in self.replies[0].update.values()]
        parts = [torch.linalg.vector_norm(part, dim=1) for part in self.rows.split(sizes, dim=1)]
        found: list[float] = torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1).tolist()
        return found

    def apart(self, place: int) -> Message:
        """The reply at index `place` as a message of its own."""
        return Message(self.replies[place].to_record(), reply_to=self.requests[place])


def answers(reply: Message) -> list[str]:
    """Ids of the messages that this message replies to."""
    if (stack := stack_of(reply)) is not None:
        return [request.metadata.message_id for request in stack.requests]
    return [reply.metadata.reply_to_message_id]


def stack_of(reply: Message) -> Stack | None:
    """The Stack in a message that holds several simulated sites' replies; None for one site's reply."""
    content = reply.content if reply.has_content() else None
    return content if isinstance(content, Stack) else None


def one_by_one(reply: Message) -> list[Message]:
    """The replies in a message as one message for each site."""
    stack = stack_of(reply)
    return [reply] if stack is None else [stack.apart(place) for place in range(len(stack.replies))]
