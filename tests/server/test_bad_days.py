"""Sites that fail, lie or stay silent: named, counted, and the model and the run go on."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.foundation.errors import StateError
from perennial.server.app import serve

EXPERIMENT = {
    "name": "bad-days",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "rounds": {"max_skipped": 2},
}
Fault = Callable[[Message, Message], Message | None]
"""(request, honest reply) -> what arrives; None for silence."""


class FaultyGrid(InProcessGrid):
    """One site whose training replies pass through a fault."""

    def __init__(self, run_config: dict[str, Any], faulty: set[int], fault: Fault) -> None:
        super().__init__(client_app, build_site_contexts(3, run_config))
        self._faulty, self._fault = faulty, fault

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        request = self._queue[0] if self._queue else None
        arrived = []
        for reply in super().pull_messages(message_ids):
            assert request is not None
            faulty = request.metadata.dst_node_id in self._faulty and request.metadata.message_type == "train"
            changed = self._fault(request, reply) if faulty else reply
            if changed is not None:
                arrived.append(changed)
        return arrived


def run(
    folder: Path, faulty: set[int], fault: Fault, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    run_config = dict(vars(RunSettings(str(path), runs=str(folder / "runs"))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    summary = serve(FaultyGrid(run_config, faulty, fault), context, "in-process")
    lines = (folder / "runs" / "bad-days" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return summary, [event for event in events if event["event"] == "round"]


def poison(request: Message, reply: Message) -> Message:
    """An update with NaN."""
    array = next(iter(reply.content.array_records["update"].values()))
    array.tensor.fill_(float("nan"))  # type: ignore[attr-defined]
    return reply


def silence(request: Message, reply: Message) -> None:
    """No reply at all."""


def stale(request: Message, reply: Message) -> Message:
    """A reply of another round."""
    reply.content.config_records["fields"]["round"] = 99
    return reply


def of_norm(norm: float) -> Fault:
    """An update of that norm."""

    def fault(request: Message, reply: Message) -> Message:
        arrays = list(reply.content.array_records["update"].values())
        for array in arrays:
            array.tensor.zero_()  # type: ignore[attr-defined]
        arrays[0].tensor.view(-1)[0] = norm  # type: ignore[attr-defined]
        return reply

    return fault


@pytest.mark.parametrize(("fault", "reason"), [(poison, "NaN"), (stale, "stale or foreign reply: round")])
def test_a_bad_reply_is_dropped_and_the_run_goes_on(tmp_path: Path, fault: Fault, reason: str) -> None:
    summary, rounds = run(tmp_path, {2}, fault)
    assert len(rounds) == 3
    for event in rounds:
        assert [drop["site"] for drop in event["dropped"]] == ["site-1"]
        assert reason in event["dropped"][0]["reason"]
        assert event["participants"] == ["site-0", "site-2"]
    assert summary["sites"]["site-1"]["rejected"] == 3
    assert summary["final_accuracy"] >= 0


def test_a_site_that_is_declared_away_from_the_first_round_on_is_listed_as_absent(tmp_path: Path) -> None:
    summary, rounds = run(
        tmp_path,
        set(),
        silence,
        absence=[{"site": "site-0", "first_round": 1, "last_round": 1}],
        tasks={"count": 1, "rounds": 2},
    )
    assert [event["absent"] for event in rounds] == [["site-0"], []]
    assert summary["rounds"] == 2


def test_when_all_fail_the_model_stays_and_the_run_stops_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"2 times in a row.*site-0.*NaN.*can be resumed"):
        run(tmp_path, {1, 2, 3}, poison)
    lines = (tmp_path / "runs" / "bad-days" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert [event["skipped"] for event in rounds] == [True, True]


@pytest.mark.parametrize(
    ("strategy", "faulty", "norm", "taken"),
    [
        ("fedavg", {2}, 1e9, 2),
        ("feddisco", {2}, 1e9, 2),
    ],
    ids=["fedavg", "feddisco"],
)
def test_an_update_that_fits_no_sum_is_dropped_by_name(
    tmp_path: Path, strategy: Any, faulty: set[int], norm: float, taken: int
) -> None:
    _, rounds = run(
        tmp_path,
        faulty,
        of_norm(norm),
        strategy=strategy,
        tasks={"count": 1, "rounds": 1},
    )
    assert len(rounds[0]["participants"]) == taken
    assert len(rounds[0]["dropped"]) == 3 - taken
    assert all("does not fit" in drop["reason"] for drop in rounds[0]["dropped"])


@pytest.mark.parametrize(("away", "said"), [(3, 1), (2, 0)])
def test_a_run_in_which_nobody_trained_says_so(tmp_path: Path, away: int, said: int) -> None:
    """It ends, because its absences were declared, and its model has learnt nothing."""
    absence = [{"site": f"site-{k}", "first_round": 1} for k in range(away)]
    run(tmp_path, set(), silence, absence=absence, tasks={"count": 1, "rounds": 1})
    text = (tmp_path / "runs" / "bad-days" / "events.jsonl").read_text()
    assert text.count("no site took part in any round") == said
