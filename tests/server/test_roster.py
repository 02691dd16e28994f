"""Who takes part: nodes say their names, and a name that is none, or another's, stops nobody else."""

from collections.abc import Iterable

import pytest
from flwr.app import Context, Message, RecordDict

from perennial.engine.grid import InProcessGrid
from perennial.protocol.messages import DescribeReply
from perennial.protocol.stamp import VERSION
from perennial.server.roster import Roster


class Nodes(InProcessGrid):
    """names: what each node calls itself, by node id. online: those connected. asked: in order."""

    def __init__(self, names: dict[int, str]) -> None:
        contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in names}
        super().__init__(self._describe, contexts)
        self.names, self.online = names, set(names)
        self.asked: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def _describe(self, message: Message, context: Context) -> Message:
        node = message.metadata.dst_node_id
        self.asked.append(node)
        reply = DescribeReply(
            version=VERSION, site="x", experiment="e" * 64, answers=[], require_privacy="none"
        ).to_record()
        # past the check of whoever writes a message: this node may lie
        reply.config_records["fields"]["site"] = self.names[node]
        return Message(reply, reply_to=message)


@pytest.mark.parametrize(
    "name", ["", "../../x", "site-0\nsite-0 is fine", "a" * 300_000, "9" * 5000, " a", "a/b", "a\u202eb"]
)
def test_a_node_whose_name_is_none_is_turned_away_and_the_others_take_part(name: str) -> None:
    notes: list[str] = []
    roster = Roster(Nodes({1: "site-0", 2: name, 3: "site-1"}), "e" * 64, notes.append)
    assert roster.connected() == {"site-0": 1, "site-1": 3}
    assert len(notes) == 1
    assert notes[0].startswith("node 2: ") and "field 'site': found" in notes[0]
    assert len(notes[0]) < 300 and "\n" not in notes[0]


def test_a_site_back_under_a_new_node_takes_part_as_soon_as_its_old_one_is_gone() -> None:
    notes: list[str] = []
    nodes = Nodes({1: "site-a", 2: "site-a"})
    nodes.online = {1}
    roster = Roster(nodes, "e" * 64, notes.append)
    assert roster.connected() == {"site-a": 1}
    nodes.online = {1, 2}
    for _ in range(2):
        assert roster.connected() == {"site-a": 1}
    assert nodes.asked == [1, 2]
    assert notes == ["node 2: takes no part: site name 'site-a' is already taken by connected node 1"]
    nodes.online = {2}
    assert roster.connected() == {"site-a": 2}
