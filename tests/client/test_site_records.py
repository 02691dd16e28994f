"""What a site keeps when its server goes back, when it was away, and when a file is damaged."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict
from safetensors.torch import save

from perennial.client import door, handlers
from perennial.client.app import app
from perennial.client.exemplars import ExemplarStore
from perennial.client.state import KEPT_VERSIONS, SiteState
from perennial.config.learner import Memory
from perennial.config.run import RunSettings
from perennial.data.federation import SiteData
from perennial.data.splits import KeyedHash, group_by_content
from perennial.engine.grid import set_task_identity
from perennial.engine.run import run_in_process
from perennial.foundation.errors import RecordGone, StateError
from perennial.protocol.messages import EvaluateRequest
from perennial.protocol.tensors import Tensors
from tests.approved import approve_installed

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 5, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 2}},
    "evaluation": {"federated": False},
}


def settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


def put(state: SiteState, *versions: int) -> None:
    for version in versions:
        state.put("own", version, {"w": torch.tensor([float(version)])}, {})


def found(state: SiteState, before: int) -> float | None:
    record = state.get("own", before)
    return None if record is None else float(record[0]["w"])


def exemplars(folder: Path, site: str, before: int) -> list[str]:
    """Hashes of what a site of a run keeps."""
    (records,) = (folder / "sites" / site / "runs").iterdir()
    record = SiteState(records, site).get("exemplars", before)
    return [] if record is None else record[1]["hashes"]


def test_a_record_outlives_a_server_that_goes_back_a_little(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "graz")
    put(state, *range(1, 10))
    assert found(state, 10) == 9 and found(state, 8) == 7
    put(state, 8)
    # what was after round 8 never was: the site may be away until long after
    assert found(state, 9) == 8 and found(state, 20) == 8
    put(state, 9, 10, 11)
    assert found(state, 12) == 11 and len(list(tmp_path.iterdir())) == KEPT_VERSIONS


def test_what_was_not_kept_is_an_error_and_not_nothing(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "graz")
    put(state, *range(2, 10))
    with pytest.raises(RecordGone, match=r"'own'.*before round 5.*round 7 and later.*remove own-0\*"):
        state.get("own", 5)
    assert found(state, 2) is None, "before the first there was none"
    put(state, 8)
    with pytest.raises(RecordGone):
        state.get("own", 7)
    for record in tmp_path.glob("own-0*.safetensors"):
        record.unlink()
    assert found(state, 5) is None
    put(state, 5)
    assert found(state, 6) == 5


def test_a_site_that_came_late_lost_nothing_when_its_server_goes_back_before_that(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "graz")
    put(state, 4, 5, 6)
    assert found(state, 3) is None
    put(state, 2)
    assert found(state, 3) == 2 and found(state, 9) == 2


@pytest.mark.parametrize(
    "facts", [None, "", "3", "{", "[" * 100_000], ids=["none", "empty", "number", "cut", "deep"]
)
def test_a_record_without_sound_facts_is_named(tmp_path: Path, facts: str | None) -> None:
    metadata = {"site": "graz"} | ({} if facts is None else {"facts": facts})
    (tmp_path / "own-00000001.safetensors").write_bytes(save({"w": torch.zeros(1)}, metadata))
    with pytest.raises(StateError, match=r"own-00000001\.safetensors: damaged \(facts.*remove it"):
        SiteState(tmp_path, "graz").get("own", 2)


def test_what_is_chosen_twice_after_one_round_is_kept_together(tmp_path: Path) -> None:
    x = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    rows, none = torch.arange(6), torch.empty(0, dtype=torch.int64)
    data = SiteData(
        "graz",
        x,
        torch.tensor([0, 0, 0, 1, 1, 1]),
        rows,
        none,
        none,
        torch.zeros(1),
        torch.ones(1),
        KeyedHash(bytes(32), group_by_content(x)),
    )
    store = ExemplarStore(SiteState(tmp_path, "graz"), data, ["cat", "dog"])
    for label, indices in ((1, rows[3:]), (0, rows[:3])):
        store.keep([label], {label: indices}, 3, known=2, version=4)
    assert sorted(store.find_indices(before_round=5).tolist()) == list(range(6))


@pytest.mark.parametrize("budget", [{"per_class": 2}, {"fixed_total": 40}])
def test_a_site_that_was_away_chooses_of_all_tasks_that_it_missed(
    tmp_path: Path, budget: dict[str, int]
) -> None:
    summary: dict[str, Any] = run_in_process(
        settings(
            tmp_path,
            tasks={"count": 5, "rounds": 2},
            absence=[{"site": "site-1", "first_round": 1, "last_round": 6}],
            learner=SMALL["learner"] | {"memory": budget},
        )
    )
    folder = tmp_path / "runs" / "small"
    assert summary["sites"]["site-1"]["rounds"] == 4
    each = Memory.model_validate(budget).compute_quota(6, 2)
    assert len(exemplars(folder, "site-1", before=7)) == 6 * each


def test_a_server_from_an_old_backup_is_told_what_the_site_no_longer_has(tmp_path: Path) -> None:
    folder, old = tmp_path / "runs" / "small", tmp_path / "backup"

    def back_up(event: dict[str, Any]) -> None:
        if event["event"] == "task_started" and event["task"] == 3:
            shutil.copytree(folder / "checkpoint", old)

    run_in_process(settings(tmp_path, tasks={"count": 5, "rounds": 3}), listener=back_up)
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(old, folder / "checkpoint")
    again = RunSettings(str(tmp_path / "experiment.yaml"), runs=str(tmp_path / "runs"), resume="yes")
    with pytest.raises(StateError, match="record 'exemplars'.*resume from a newer checkpoint"):
        run_in_process(again)
    for record in folder.glob("sites/*/runs/*/exemplars-0*.safetensors"):
        record.unlink()
    resumed: dict[str, Any] = run_in_process(again)
    for site in ("site-0", "site-1"):
        assert resumed["sites"][site]["refused"] == 0, "no attempt that failed counts as a round"
        assert len(exemplars(folder, site, before=99)) == 10 * 2


def test_the_operator_reads_of_a_record_that_is_gone_and_not_of_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps({"site": "site-0", "state_dir": str(tmp_path / "state")}))
    approval = approve_installed(Path(settings(tmp_path).experiment), tmp_path / "approvals")
    config = {"digest": approval.experiment, "runs": str(tmp_path), "device": "cpu"}
    ids: dict[str, Any] = {"run": "0" * 16, "experiment": "e" * 64, "class_order": "c" * 64}
    request = EvaluateRequest(**ids, task=1, round=1, num_classes=2, arrays=Tensors(w=torch.zeros(1)))
    set_task_identity()
    reasons = []
    for error in (RecordGone("asked for round 3"), StateError("/srv/patient/x: damaged")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(handlers, "answer_evaluate", fail)
        monkeypatch.setattr(door, "admit_request", lambda identity, request: nullcontext())
        context = Context(1, 1, {"site": str(site)}, RecordDict(), dict(config))
        reply = app(Message(request.to_record(), 1, "evaluate"), context)
        fields = reply.content.config_records["fields"]
        reasons.append((fields["kind"], fields["reason"]))
    assert reasons[0] == ("state", "asked for round 3")
    assert reasons[1] == ("state", "StateError; the details are in this site's own log")


def test_an_erased_exemplar_is_left_out_and_not_told() -> None:
    """A refusal would tell the server whose record was erased."""
    store = object.__new__(ExemplarStore)
    names = ["a", "b", "c"]
    store._data = SimpleNamespace(y=names, sample_hash=lambda place: names[place])  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    kept = store._correct_index(torch.tensor([0, 1, 2]), ["a", "erased", "b"], None)  # pyright: ignore[reportPrivateUsage]
    assert kept.tolist() == [0, 1]


def test_a_moved_exemplar_is_found_at_a_row_of_its_own_label_and_no_row_comes_twice() -> None:
    """A row of another task with the same content would train twice, and the exemplar not at all."""
    store = object.__new__(ExemplarStore)
    contents, labels = ["new", "x", "y", "y", "x"], torch.tensor([0, 0, 1, 1, 2])
    store._data = SimpleNamespace(y=labels, sample_hash=lambda place: contents[place])  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    for before, found in (([0, 1, 2], [1, 3, 2]), ([3, 2, 0], [1, 2, 3]), ([4, 3, 2], [1, 3, 2])):
        kept = store._correct_index(torch.tensor(before), ["x", "y", "y"], [0, 1, 1])  # pyright: ignore[reportPrivateUsage]
        assert kept.tolist() == found
    assert store._correct_index(torch.tensor([0]), ["x"], None).tolist() == [1]  # pyright: ignore[reportPrivateUsage]
