"""A SuperNode's question for a message waits at the SuperLink, and none that comes meanwhile is missed."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perennial.deploy import waiting_pulls
from perennial.deploy.flower_seam import fleet_message_handler
from perennial.deploy.waiting_pulls import Arrivals, let_pulls_wait


class LinkState:
    """As much of Flower's as is asked for: messages by the node that they are for."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.looked = threading.Event()

    def store_message_and_object_tree(self, message: Any, tree: Any) -> bool:
        self.messages.append(message.metadata.dst_node_id)
        return True


@pytest.fixture
def link_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkState]:
    def pull(request: Any, state: LinkState) -> Any:
        found = [node for node in state.messages if node == request.node.node_id]
        state.looked.set()
        return SimpleNamespace(messages_list=found)

    monkeypatch.setattr(fleet_message_handler, "pull_messages", pull)
    monkeypatch.setattr(waiting_pulls, "WAIT", 20.0)

    class Own(LinkState):
        store_message_and_object_tree = LinkState.store_message_and_object_tree

    let_pulls_wait(Own)
    yield Own()


def ask(state: LinkState, node: int = 7) -> tuple[list[int], float]:
    """(messages, seconds until they were answered)."""
    began = time.monotonic()
    request = SimpleNamespace(node=SimpleNamespace(node_id=node))
    found = fleet_message_handler.pull_messages(request=request, state=state).messages_list
    return found, time.monotonic() - began


def message(node: int) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node))


def test_a_question_is_answered_as_soon_as_a_message_has_come(link_state: LinkState) -> None:
    def send() -> None:
        link_state.looked.wait(10)
        link_state.store_message_and_object_tree(message(8), None)
        time.sleep(0.3)
        assert asking.is_alive(), "a message for another node wakes nobody"
        link_state.store_message_and_object_tree(message(7), None)

    answers: list[tuple[list[int], float]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(link_state)))
    asking.start()
    send()
    asking.join(10)
    ((found, seconds),) = answers
    assert found == [7] and seconds < 15


def test_a_message_that_comes_between_the_look_and_the_wait_is_not_missed() -> None:
    arrivals = Arrivals()
    come = arrivals.expect(7)
    arrivals.note(7)
    began = time.monotonic()
    arrivals.wait(come)
    assert time.monotonic() - began < waiting_pulls.WAIT / 2


def test_where_too_many_wait_a_question_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_pulls, "MOST", 0)
    began = time.monotonic()
    arrivals = Arrivals()
    arrivals.wait(arrivals.expect(7))
    assert time.monotonic() - began < waiting_pulls.WAIT / 2
