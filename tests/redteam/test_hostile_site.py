"""A site that lies, against the server: names, counts that it withholds, and figures that cannot be."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from perennial.baselines.feddisco import check_counts
from perennial.config.experiment import load_experiment
from perennial.config.run import APP_ROOT
from perennial.engine.grid import InProcessGrid
from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.names import write_registered
from perennial.protocol.messages import DescribeReply
from perennial.protocol.stamp import VERSION
from perennial.server.evaluation import pool_counts, withhold_counts
from perennial.server.journal import Journal
from perennial.server.metrics import average_accuracy, compute_balanced_accuracy, compute_task_accuracies
from perennial.server.roster import Attendance, Roster
from perennial.strategies.round.exchange import check_withheld
from perennial.strategies.round.gate import Rejected


class Nodes(InProcessGrid):
    """names: what each node calls itself, by node id."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__(self._describe, {node: Context(1, node, {}, RecordDict(), {}) for node in names})
        self.names = names

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.names)

    def _describe(self, message: Message, context: Context) -> Message:
        name = self.names[message.metadata.dst_node_id]
        reply = DescribeReply(
            version=VERSION, site=name, experiment="e" * 64, answers=[], require_privacy="none"
        )
        return Message(reply.to_record(), reply_to=message)


def test_a_name_belongs_to_its_key(tmp_path: Path) -> None:
    record, notes = tmp_path / "nodes.json", []
    write_registered(record, {"1": "graz", "2": "linz"})
    nodes = Nodes({1: "linz", 2: "linz", 3: "wien"})
    roster = Roster(nodes, "e" * 64, notes.append, record)
    # the liar comes first, and takes nothing from the one whose name it is
    assert roster.connected() == {"linz": 2}
    assert notes == [
        "node 1: takes no part: it says it is site 'linz', but its key is that of site 'graz'",
        "node 3: takes no part: it says it is site 'wien', and no registered site has its key",
    ]
    # each is named as the operator knows it, is not missing, and nobody's name is taken
    assert (
        list(roster.list_barred()) == ["graz", "node 3"]
        and "that of site 'graz'" in roster.list_barred()["graz"]
    )
    write_registered(record, {"1": "graz", "2": "linz", "4": "wels"})
    experiment = load_experiment(APP_ROOT / "experiments" / "quickstart.yaml")
    attendance = Attendance(roster, experiment, Journal(tmp_path), waits_for_sites=True)
    assert attendance.list_missing(roster.connected()) == ["wels"]
    record.write_text("nonsense")
    with pytest.raises(StateError, match=r"nodes\.json: the record of registered sites cannot be read"):
        Roster(nodes, "e" * 64, notes.append, record).connected()


def test_what_is_withheld_has_no_counts_and_is_a_class() -> None:
    check_withheld([1], [5, 0])
    for withheld in ([2], [0]):
        with pytest.raises(ProtocolError, match="withheld: found class"):
            check_withheld(withheld, [5, 0])


def test_an_accuracy_that_needs_a_withheld_class_is_not_told() -> None:
    one = withhold_counts([9, 0, 0], [10, 0, 0], [1, 2])
    other = withhold_counts([8, 6, 0], [10, 10, 0], [2])
    correct, total = pool_counts([one, other], 3)
    assert (correct, total) == ([17, 6, 0], [20, 10, None])
    row, sizes = compute_task_accuracies(correct, total, [0, 2, 3])
    assert row == [pytest.approx(23 / 30), None] and sizes == [30, 0]
    assert average_accuracy(row, sizes) is None and compute_balanced_accuracy(correct, total) is None
    # a class of which no site has a sample, and none withholds it, is as it was
    assert pool_counts([([9, 0], [10, 0])], 2) == ([9, 0], [10, 0])


def test_withheld_label_counts_are_spread_and_never_more_than_the_samples() -> None:
    assert check_counts([30, None, None], 50, 3) == [30, 10, 10]
    assert check_counts([30, None], 20, 2) == [30, 1]
    for lie in ([None, sys.maxsize], [None, -1], [None, 0.5], None):
        with pytest.raises(Rejected, match="label_counts"):
            check_counts(lie, 10, 2)
