"""What the pages know of a run: read as it is written, whoever wrote it."""

import json
import os
import time
from pathlib import Path

import pytest

from perennial.foundation.heartbeat import SILENT_AFTER, keep_beating
from perennial.live import tail as module
from perennial.live.diagnosis import of_run
from perennial.live.operator import OperatorPages, Spending, draw_accuracy, tell_story
from perennial.live.run_state import RoundPoint, RunState
from perennial.live.tail import Tail, clean_value
from perennial.server.control import ALIVE
from tests.live_pages import GoingOn, going_on, room_for
from tests.run_folders import HOSTILE


def read(state: RunState) -> RunState:
    state.read()
    return state


def test_a_tail_reads_on_and_begins_anew_where_the_file_is_another(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert list(tail.read()) == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert list(tail.read()) == [{"b": 2}] and not tail.restarted
    # a resumed run cuts the journal and writes on, past where this tail stood
    path.write_bytes(b'{"c": 3}\n{"d": 4}\n{"e": 5}\n')
    assert list(tail.read()) == [{"c": 3}, {"d": 4}, {"e": 5}] and tail.restarted
    path.unlink()
    assert list(tail.read()) == [] and tail.restarted


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN', b'"' + b"x" * 1000]
)
def test_a_line_that_is_no_object_is_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(line + b'\n{"a": 1}\n')
    tail = Tail(path)
    assert list(tail.read()) == [{"a": 1}] and tail.damaged == 1


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    monkeypatch.setattr(module, "CHUNK", 400)
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 50_000 + b'\n{"a": 1}\n')
    tail = Tail(path)
    assert list(tail.read()) == [{"a": 1}] and tail.damaged >= 1
    assert len(tail._rest) <= 1400


def test_a_pipe_or_a_link_in_place_of_the_journal_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert list(Tail(tmp_path / "pipe").read()) == list(Tail(tmp_path / "link").read()) == []


def test_text_of_others_is_cut_and_turns_nothing_around() -> None:
    assert clean_value("a\x1b[31m\u202eb\n", 80) == "a\ufffd[31m\ufffdb\ufffd"
    assert len(clean_value("x" * 10_000)) == 401
    assert clean_value("Köln Süd") == "Köln Süd"


def test_a_round_is_followed_from_its_first_request_to_its_end(tmp_path: Path) -> None:
    with going_on(tmp_path) as run:
        state = RunState(run.folder)
        run.begin_round(1, ["graz", "linz"], missing=["wels"])
        assert read(state).status == "running"
        assert [(site.name, site.status) for site in state.sites()] == [
            ("wels", "offline"),
            ("graz", "training"),
            ("linz", "training"),
        ]
        run.answer("graz")
        run.answer("linz", "policy: no <b>", refused=True)
        read(state)
        assert not state.waited_for and "2 of 2 sites answered" in tell_story(state)
        assert {site.name: (site.status, site.reason) for site in state.sites()} == {
            "graz": ("answered", ""),
            "linz": ("refused", "policy: no <b>"),
            "wels": ("offline", "not connected"),
        }
        assert {fault.kind for fault in of_run(state)} == {"policy", "silent"}
        run.end_round(1, ["graz"], refused=[{"site": "linz", "reason": "policy: no <b>"}], accuracy=0.5)
        assert read(state).accuracy == 0.5 and state.refused["linz"] == 1
        run.begin_round(2, ["graz", "linz"])
        run.answer("linz")
        assert read(state).site("linz", False).status == "answered"
        run.journal.write("run_finished", final_accuracy=0.5, seconds=1.0)
        assert read(state).status == "finished"


def test_a_run_without_a_heartbeat_is_known_as_dead_within_seconds(tmp_path: Path) -> None:
    run = GoingOn(tmp_path)
    state = RunState(run.folder)
    with keep_beating(run.folder / ALIVE):
        assert read(state).status == "running"
    # a regular end removes the heartbeat; a kill leaves it behind, and it grows old
    assert read(state).status == "ended"
    (run.folder / ALIVE).touch()
    old = time.time() - SILENT_AFTER - 1
    os.utime(run.folder / ALIVE, (old, old))
    assert read(state).status == "silent"
    found = [fault for fault in of_run(state) if fault.kind == "serverapp"]
    assert [fault.command for fault in found] == ["perennial deploy resume trial"]


def test_a_resumed_run_forgets_the_rounds_that_were_cut_off(tmp_path: Path) -> None:
    run = GoingOn(tmp_path)
    state = RunState(run.folder)
    position = run.journal.flush_to_disk()
    for number in (1, 2, 3):
        run.end_round(number, ["graz"])
    assert len(read(state).rounds) == 3
    os.truncate(run.folder / "events.jsonl", position)
    run.journal.close()
    resumed = type(run.journal)(run.folder, position)
    resumed.write("resumed", experiment="trial", engine="grpc")
    resumed.write("round", **{**json.loads(json.dumps({"task": 1, "round": 1, "participants": ["graz"]}))})
    assert [point.round for point in read(state).rounds] == [1]


HOSTILE_EVENTS = [
    {"event": "round"},
    {"event": "round", "round": "x", "task": None, "participants": {"a": 1}, "dropped": [1, {"site": 2}]},
    {
        "event": "round",
        "round": 1e400,
        "task": -1,
        "accuracy": "NaN",
        "seconds": -1,
        "details": {"weights": [1]},
    },
    {"event": "round", "round": 1, "details": {"cross_site": [HOSTILE]}},
    {
        "event": "round",
        "round": 1,
        "details": {
            "cross_site": {
                HOSTILE: {
                    "skill": HOSTILE,
                    "given": True,
                    "marked": [HOSTILE],
                    "benefit": {HOSTILE: HOSTILE},
                },
                "graz": {"benefit": [1]},
                "linz": HOSTILE,
            }
        },
    },
    {"event": "task_finished", "task": 1, "accuracy": "no", "class_accuracy": [None, "x", {}]},
    {"event": "task_started", "classes": [1, HOSTILE, None]},
    {"event": "note", "text": {"a": HOSTILE}},
    {"event": "note", "text": HOSTILE, "time": "yesterday"},
    {"event": "paused", "reason": [HOSTILE], "missing": "all"},
    {"event": "waiting"},
    {"event": ["round"]},
    {"event": "run_started", "time": 10**400},
    {},
]


@pytest.mark.parametrize("event", HOSTILE_EVENTS)
def test_events_that_no_run_writes_break_no_page(tmp_path: Path, event: dict[str, object]) -> None:
    with going_on(tmp_path) as run:
        run.raw(json.dumps(event).encode() + b"\n")
        run.begin_round(1, [HOSTILE, "graz"])
        run.answer(HOSTILE, HOSTILE, refused=True)
        drawn = OperatorPages(tmp_path).draw_run("trial")
        assert "<script>" not in drawn and "<img" not in drawn and "onload='" not in drawn


def test_a_chart_of_nothing_is_none_and_one_of_much_stays_small(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    assert draw_accuracy(state) == ""
    state.rounds = [RoundPoint(n, 1, 1, False, None if n % 7 == 0 else 0.5, 1.0) for n in range(100_000)]
    assert "<svg" in draw_accuracy(state) and len(draw_accuracy(state)) < 20_000


def test_spending_is_never_less_than_what_was_asked_for(tmp_path: Path) -> None:
    entry = {
        "run": "a" * 32,
        "experiment": "b" * 64,
        "recipient": "server",
        "kind": "update",
        "unit": "sample",
        "relation": "add_remove",
        "mechanism": "gaussian",
        "noise_multiplier": 1.0,
        "sample_rate": 0.1,
        "steps": 10,
    }
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    lines = [
        {"round": n, "asked": ["graz", "linz"], "once": "", "same": "", "entries": [entry]} for n in (1, 2)
    ]
    lines += [{"round": 2, "refused": ["linz"], "once": "", "same": "", "entries": [entry]}]
    (tmp_path / "releases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "cut")
    spending = Spending(tmp_path)
    spending.read()
    assert spending.unit == "sample"
    assert 0 < spending.by_site["linz"] < spending.by_site["graz"]


EXPERIMENT = """
name: trial
data: {source: digits, partition: {kind: dirichlet, alpha: 0.5}, sites: 2}
tasks: {count: 2, rounds: 2}
model: {name: small_cnn}
learner: {preset: none, optimizer: {lr: 0.1}, batch_size: 8}
strategy: {name: fedavg}
privacy: {mode: sample, clip_norm: 1.0, noise_multiplier: 1.0, sample_rate: 0.1, delta: 1.0e-5}
evaluation: {federated: false}
"""


def test_a_site_that_was_there_and_is_not_any_more_is_named_in_later_rounds_too(tmp_path: Path) -> None:
    with going_on(tmp_path) as run:
        run.begin_round(1, ["graz", "linz"])
        run.end_round(1, ["graz", "linz"])
        run.begin_round(2, ["graz"])
        state = RunState(run.folder)
        state.read()
        assert state.offline == {"linz"}
        assert [(fault.kind, fault.site) for fault in of_run(state)] == [("silent", "linz")]
        run.begin_round(3, ["graz", "linz"])
        state.read()
        assert not state.offline


@pytest.mark.parametrize(
    ("free", "total", "full"),
    [
        (1e9, 250e9, ["disk_low"]),
        (8e9, 250e9, []),
        (100e9, 10e12, []),
        (1e9, 10e9, []),
        (0.1e9, 10e9, ["disk_low"]),
        (0.01e9, 250e9, ["disk_full"]),
    ],
)
def test_a_disk_is_nearly_full_by_share_and_by_bytes(
    tmp_path: Path, free: float, total: float, full: list[str]
) -> None:
    with going_on(tmp_path) as run, room_for(free, total):
        kinds = [fault.kind for fault in of_run(read(RunState(run.folder)))]
    assert kinds == full


def test_classes_that_are_never_recognised_need_attention(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.alive = True
    state._take({"event": "task_started", "task": 1, "classes": ["mel", "nev"]})
    done = {"event": "task_finished", "task": 1, "accuracy": [0.5], "average_accuracy": 0.5}
    state._take({**done, "class_accuracy": [0.0, 0.9]})
    (fault,) = [fault for fault in of_run(state) if fault.kind == "unrecognised"]
    assert fault.detail == "1 of 2: mel."
    state._take({**done, "class_accuracy": [0.1, None]})
    assert not [fault for fault in of_run(state) if fault.kind == "unrecognised"]
