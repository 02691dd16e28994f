"""A Flower Grid whose nodes are calls of the ClientApp in this process."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from perennial.client.app import RAISED
from perennial.engine.cohorts import Cohorts

Client = Callable[[Message, Context], Message]
"""A ClientApp, or a function that calls one."""

FIRST_NODE = 1
"""Node ids of simulated sites count from here; 0 is the server."""


class InProcessGrid(Grid):
    """A Grid in one process: messages wait in a queue, each pull answers the next; tensors are shared.

    client: the ClientApp. contexts: one for each site, by node id. cohorts: sites that train in one pass;
    None: each answers by itself.
    """

    def __init__(self, client: Client, contexts: dict[int, Context], cohorts: Cohorts | None = None) -> None:
        self._client = client
        self._contexts = contexts
        self._cohorts = cohorts
        self._queue: deque[Message] = deque()
        self._together: dict[str, list[Message]] = {}
        """The messages of a cohort, which stand in the queue one behind the other, by the id of the first."""
        self._numbers = count(1)
        self._run: Any = None
        set_task_identity()

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        if self._run is None:
            raise ValueError("the in-process engine was given no Run")
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = [self._number(message) for message in messages]
        self._queue.extend(messages)
        for cohort in self._cut(messages):
            if len(cohort) > 1:
                self._together[cohort[0].metadata.message_id] = cohort
        return ids

    def _cut(self, messages: list[Message]) -> list[list[Message]]:
        """The messages, in their order, as those that are answered together."""
        return [[message] for message in messages] if self._cohorts is None else self._cohorts.cut(messages)

    def _number(self, message: Message) -> str:
        """Give message its id."""
        return give_number(message, f"message-{next(self._numbers)}").metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the oldest waiting message, or its cohort, and return the replies; [] when none is waiting.

        message_ids are not looked at: the replies may be to other messages.
        """
        if not self._queue:
            return []
        message = self._queue.popleft()
        cohort = self._together.pop(message.metadata.message_id, [message])
        for _ in cohort[1:]:
            self._queue.popleft()
        return answer_messages(self._client, self._cohorts, cohort, self._contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.push_messages(messages)
        while self._queue:
            yield from self.pull_messages([])

    def close(self) -> None:
        """Release nothing; a WorkerGrid ends its processes here."""


def answer_messages(
    client: Client, cohorts: Cohorts | None, messages: list[Message], contexts: dict[int, Context]
) -> list[Message]:
    """Have the ClientApp answer messages together, and return its replies.

    contexts: by node id. As at a SuperNode, an app that raises answers with an error and the run goes on.
    """
    own = [contexts[message.metadata.dst_node_id] for message in messages]
    try:
        if cohorts is None or len(messages) == 1:
            return [client(message, context) for message, context in zip(messages, own, strict=True)]
        return cohorts.answer(messages, own)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fault = Error(RAISED, reason)
        return [Message(fault, reply_to=message) for message in messages]


def build_site_contexts(sites: int, run_config: dict[str, Any]) -> dict[int, Context]:
    """A Context for each of `sites` simulated sites, by node id, as Flower's simulation would make it."""
    return {
        FIRST_NODE + index: Context(
            run_id=1,
            node_id=FIRST_NODE + index,
            node_config={"partition-id": index, "num-partitions": sites},
            state=RecordDict(),
            run_config=dict(run_config),
        )
        for index in range(sites)
    }


def give_number(message: Message, number: str) -> Message:
    """Give a message its id, as the SuperLink does, and return it."""
    # Metadata has no public way: its constructor is "for internal use only"
    message.metadata.__dict__["_message_id"] = number
    return message


def set_task_identity() -> None:
    """Set the task identity without which Flower builds no Message.

    Flower's own runtimes set it too, and this engine is a runtime: strategies of Flower build messages in it.
    """
    # the one private module of Flower (tests/repository/test_flower_names.py); there is no public way
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0


Listener = Callable[[dict[str, Any]], None]
