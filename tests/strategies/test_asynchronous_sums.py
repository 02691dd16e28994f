"""Sites that answer when they can: the model is solved anew whenever sums arrive, and no order matters."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, RecordDict
from safetensors import safe_open

from perennial.client.app import app as client_app
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, site_contexts
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import StatisticsReply
from perennial.server.app import serve
from tests.strategies.test_analytic_runs import experiment, run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


class PatientGrid(InProcessGrid):
    """Sums of one node come `late` seconds later; its first `lost` replies with sums never come."""

    def __init__(self, contexts: dict[int, Context], late: float, lost: int) -> None:
        super().__init__(client_app, contexts)
        self.late, self.lost, self.answered = late, lost, 0
        self._node = min(contexts)
        self._held: list[tuple[float, Message]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            of_sums = read_kind(reply.content) == StatisticsReply.__name__
            self.answered += of_sums
            slow = of_sums and reply.metadata.src_node_id == self._node
            if slow and self.lost:
                self.lost -= 1
                continue
            self._held.append((time.monotonic() + self.late * slow, reply))
        now, wanted = time.monotonic(), set(message_ids)
        ready = [e for e in self._held if e[0] <= now and e[1].metadata.reply_to_message_id in wanted]
        self._held = [entry for entry in self._held if entry not in ready]
        return [reply for _, reply in ready]


def asynchronous(
    folder: Path, name: str, late: float = 0.0, lost: int = 0, deadline: float = 20.0, rounds: Any = 12
) -> tuple[dict[str, Any], PatientGrid]:
    content = experiment(
        tasks={"count": 2, "rounds": rounds},
        rounds={"asynchronous": True, "deadline": deadline, "max_skipped": 9},
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    settings = RunSettings(str(path), name=name, runs=str(folder / "runs"), device="cpu")
    config = dict(vars(settings))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    grid = PatientGrid(site_contexts(4, config), late, lost)
    return serve(grid, context, "in-process"), grid


@pytest.fixture
def together(tmp_path: Path) -> dict[str, Any]:
    return run(tmp_path, "together", tasks={"count": 2, "rounds": 1})


def test_each_arrival_makes_a_version_and_the_last_is_the_model_of_all(
    tmp_path: Path, together: dict[str, Any]
) -> None:
    found, grid = asynchronous(tmp_path, "late", late=0.4)
    assert found["analytic"]["sums_sha256"] == together["analytic"]["sums_sha256"]
    assert found["model_sha256"] == together["model_sha256"]
    assert grid.answered == 4 * 2, "no site adds up the same samples twice"
    assert 2 < found["rounds"] < 2 * 12, "a task ends when all sites have answered"
    versions = sorted((tmp_path / "runs" / "late" / "versions").iterdir())
    assert len(versions) == found["rounds"]
    with safe_open(versions[0], "pt") as first, safe_open(versions[-1], "pt") as last:
        assert "site-0" not in first.metadata()["facts"] and "site-0" in last.metadata()["facts"]
        assert found["analytic"]["sums_sha256"] in last.metadata()["facts"]
        assert last.get_tensor("head.weight").shape == (10, 60)


def test_sums_of_an_earlier_task_still_count_in_a_later_one(tmp_path: Path, together: dict[str, Any]) -> None:
    """Task 1 has one round, in which the slow site does not answer."""
    found, grid = asynchronous(tmp_path, "later", late=0.4, rounds=[1, 12])
    assert found["model_sha256"] == together["model_sha256"]
    assert grid.answered == 4 * 2


def test_a_request_that_was_lost_is_renewed(tmp_path: Path, together: dict[str, Any]) -> None:
    found, grid = asynchronous(tmp_path, "lost", lost=1, deadline=0.5)
    assert found["model_sha256"] == together["model_sha256"]
    assert grid.answered == 4 * 2 + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": {"head": "balanced_ridge", "shrinkage": 1.0}}, "weighs by the counts of all sites"),
        ({"strategy": {"shrinkage": "validation"}}, "asks all sites at once"),
        (
            {
                "strategy": {"name": "fedavg"},
                "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
                "model": {"name": "mlp"},
            },
            "trains in rounds that all sites share",
        ),
    ],
)
def test_what_needs_all_sites_at_once_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(experiment(rounds={"asynchronous": True}, **changes))
