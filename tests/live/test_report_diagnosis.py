"""A report says of a finished run what the pages say."""

import html
import json
from pathlib import Path

import pytest

from perennial.live.operator import OperatorPages
from perennial.server.faults import KINDS, of_summary
from perennial.server.measures.record import ClassMeasures, Measures, write_measures
from perennial.server.report.write import find_faults, write_report
from perennial.server.run_record import read_run
from tests.live.test_diagnosis import CALM, MARKED
from tests.live_pages import room_for
from tests.run_folders import round_event, write_run

SIGNS = {
    "tasks": [{"task": 3, "signs": ["of 3 classes the model recognises one"]}],
    "to_try": ["model.norm: group"],
}
BAD = {
    "collapsed": {"stopped_learning": SIGNS},
    "unrecognised": {"class_accuracy": [[0.9], [0.6, 0.8], [0.0, 0.7, 0.9]]},
    "forgetting": {"accuracy_matrix": [[0.9], [0.6, 0.8], [0.5, 0.7, 0.9]]},
    "contradicting": {"cross_site": {"features": 2, "sites": MARKED}},
}


def write_bad(parent: Path, kind: str) -> Path:
    """A finished run with one fault."""
    good = {"accuracy_matrix": [[0.9], [0.9, 0.8], [0.9, 0.7, 0.9]]}
    folder = write_run(parent / "bad", engine="grpc", **(good | BAD[kind]))
    events = [
        {"event": "run_started", "engine": "grpc"},
        {"event": "task_started", "classes": ["a", "b", "c"]},
        round_event(1, 1, details={"cross_site": MARKED} if kind == "contradicting" else {}),
    ]
    for task, row in enumerate(json.loads((folder / "summary.json").read_text())["accuracy_matrix"], start=1):
        facts = {"class_accuracy": BAD[kind].get("class_accuracy", [[0.9]] * 3)[task - 1]}
        facts |= {"stopped": SIGNS["tasks"][0]["signs"]} if kind == "collapsed" and task == 3 else {}
        events.append({"event": "task_finished", "task": task, "accuracy": row, **facts})
    events.append({"event": "run_finished"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize("kind", BAD)
def test_a_report_says_of_a_finished_run_what_the_pages_say(tmp_path: Path, kind: str) -> None:
    folder = write_bad(tmp_path, kind)
    (fault,) = find_faults(read_run(folder))
    assert fault.kind == kind and "r" in KINDS[kind].seen
    report = html.unescape(write_report(folder).read_text())
    assert f"<strong>{fault.said}</strong> {fault.turn}" in report
    pages = OperatorPages(tmp_path)
    with room_for(1e12):
        drawn = html.unescape(pages.draw_index())
        assert fault.cause in html.unescape(pages.draw_run("bad"))
    assert f"<strong>{fault.cause}" in drawn and CALM not in drawn


@pytest.mark.parametrize(("samples", "named"), [(9, False), (10, True)])
def test_a_class_that_few_samples_judged_is_no_fault(tmp_path: Path, samples: int, named: bool) -> None:
    """Neither in the report nor on the operator's pages."""
    folder = write_bad(tmp_path, "unrecognised")
    counts = {"a": samples, "b": 50, "c": 50}
    classes = [ClassMeasures(name=name, samples=each, called=0) for name, each in counts.items()]
    write_measures(folder, Measures(source="server", samples=110, held_out=110, classes=classes))
    assert bool(find_faults(read_run(folder))) == named
    with room_for(1e12):
        page = html.unescape(OperatorPages(tmp_path).draw_run("bad"))
    assert (KINDS["unrecognised"].cause.format(run="bad") in page) == named


def test_a_run_without_a_fault_has_no_alert(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "good", accuracy_matrix=[[0.9], [0.9, 0.8], [0.9, 0.7, 0.9]])
    assert find_faults(read_run(folder)) == []
    summary = read_run(folder).summary
    assert not list(of_summary("good", summary))
