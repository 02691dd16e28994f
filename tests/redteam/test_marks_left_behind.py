"""A server that reads what one record left on a site's disk: which versions are there, and which error comes.

Each attack was run against a site of its own table; the pairs of tables differ in one record.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perennial.client import consent
from perennial.client.exemplars import select_exemplars
from perennial.client.handlers import answer_evaluate, answer_finish_task
from perennial.client.release import AFTER_DATA
from perennial.client.training_turn import TrainingTurn
from perennial.config.learner import Memory
from perennial.foundation.errors import PolicyRefusal
from perennial.learning.training import find_fewest_samples
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state, select_travelling
from perennial.protocol.messages import EvaluateRequest, FinishTaskRequest, TrainRequest
from perennial.protocol.tensors import Tensors, hash_tensors
from tests.redteam.attacked_hospital import RUN, TABLE, Hospital, rows, write_table
from tests.redteam.test_free_answers import HERDING, LOCAL, NATURAL, SAMPLE, hospital, own_cache, stamp, told

__all__ = ["own_cache"]
CLASSES = [*"abcdefgh"]
TASKS = {"count": 4, "rounds": 1, "order": "natural"}
HERDED: dict[str, Any] = {
    "data": TABLE | {"classes": CLASSES},
    "tasks": TASKS,
    "privacy": LOCAL,
    "learner": HERDING["learner"] | {"memory": {"selection": "herding", "fixed_total": 16}},
}
KNOWN = [[f"{place / 40:.3f}", "3.0", CLASSES[place % 8]] for place in range(80)]
TARGET = [["7.5", "3.0", "c"]]


def model(place: Hospital, classes: int, overflows: bool = False) -> Tensors:
    """A model; one that overflows does so for the target alone, whose first column is above 7."""
    made = build_model(place.experiment.model, place.site.data.input_shape, classes, 5)
    arrays = Tensors({name: tensor.clone() for name, tensor in select_travelling(made).items()})
    if overflows:
        weights = [name for name in arrays if name.startswith("backbone") and name.endswith("weight")]
        biases = [name for name in arrays if name.startswith("backbone") and name.endswith("bias")]
        for tensor in arrays.values():
            tensor.zero_()
        arrays[weights[0]][0, 0], arrays[biases[0]][0] = 1e10, -7e10
        arrays[weights[1]][0, 0], arrays[weights[2]][0, 0], arrays[biases[3]][0] = 1e15, 1e18, 1.0
    return arrays


def finish(place: Hospital, number: int, classes: int, overflows: bool = False) -> FinishTaskRequest:
    place_of = stamp(place, task=classes // 2, round=number, num_classes=classes)
    return FinishTaskRequest(**place_of, arrays=model(place, classes, overflows))


def update(place: Hospital, number: int, classes: int, another: float = 0.0) -> TrainRequest:
    """A question of round `number`; with `another` one that was not asked before."""
    earlier, arrays = {}, model(place, classes)
    next(iter(arrays.values()))[:] += another
    if classes > 2:
        former = build_model(place.experiment.model, place.site.data.input_shape, classes - 2, 5)
        old = Tensors({name: tensor.clone() for name, tensor in complete_state(former).items()})
        earlier = {"previous": hash_tensors(old), "previous_arrays": old}
    place_of = stamp(place, task=classes // 2, round=number, num_classes=classes)
    return TrainRequest(**place_of, arrays=arrays, **earlier)


def versions(place: Hospital) -> list[str]:
    state = Path(place.config.state_dir)
    return sorted(path.name for path in state.glob("runs/*/exemplars-*"))


def test_a_record_that_makes_herding_fail_leaves_no_mark(tmp_path: Path) -> None:
    found = []
    for name, table in (("without", KNOWN), ("with", KNOWN + TARGET)):
        place = hospital(tmp_path / name, table, "client_local", **HERDED)
        for number in range(1, 5):
            reply = place.ask(finish(place, number, 2 * number, overflows=number == 2))
            assert reply is not None, place.refusal
        found.append((versions(place), told(place, update(place, 2, 4))))
    assert found[0] == found[1]
    # round 1's version is forgotten: that is said before anything is read or charged
    assert found[0][1][1].startswith("state: record 'exemplars'") and found[0][1][3] == []


def test_a_choice_that_fails_writes_its_version_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = hospital(tmp_path / "fails", KNOWN, "client_local", **HERDED)
    assert place.ask(finish(place, 1, 2)) is not None
    kept = place.site.open_exemplars(RUN).find_indices(2).tolist()

    def failing(*_: Any) -> None:
        raise MemoryError("of one record")

    monkeypatch.setattr("perennial.client.training_samples.compute_unit_features", failing)
    assert place.ask(finish(place, 2, 4)) is not None, place.refusal
    assert len(versions(place)) == 2
    of_class = [[row for row in kept if place.site.data.y[row] == label] for label in (0, 1)]
    # the budget is for four classes now
    shorter = [row for listed in of_class for row in listed[:2]]
    assert 0 < len(shorter) < len(kept)
    assert place.site.open_exemplars(RUN).find_indices(3).tolist() == shorter


def test_a_record_of_a_class_decides_no_version(tmp_path: Path) -> None:
    """One record of the task that ended while the site was away, in rounds that come again."""
    found = []
    changes: dict[str, Any] = HERDED | {
        "data": TABLE | {"classes": CLASSES[:6]},
        "tasks": {"count": 3, "rounds": 2, "order": "natural"},
        "learner": HERDING["learner"] | {"memory": {"selection": "random", "per_class": 3}},
    }
    known = [[f"{place / 9:.3f}", "3.0", "cdef"[place % 4]] for place in range(60)]
    for name, table in (("without", known), ("with", [["7.5", "9.0", "a"], *known])):
        place, seen = hospital(tmp_path / name, table, "client_local", **changes), []
        for number in range(1, 7):
            classes = 2 * ((number + 1) // 2)
            # it was away when the first task ended
            seen.append(told(place, update(place, number, classes)))
            if number == 4:
                assert place.ask(finish(place, number, classes)) is not None, place.refusal
            seen.append(versions(place))
        seen.append(told(place, update(place, 3, 4, another=1.0)))
        found.append(seen)
    assert found[0] == found[1]
    assert found[0][-1][0] == "TrainReply", found[0][-1]


def test_what_a_site_demands_is_asked_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unprotected: dict[str, Any] = HERDED | {
        "privacy": {"mode": "none"},
        "data": HERDED["data"] | {"test_fraction": 0.2},
        "evaluation": {"federated": True, "measures": True},
        "learner": HERDED["learner"] | {"classifier": "nearest_mean"},
    }
    answers = ("train", "evaluate", "measures")
    place = hospital(tmp_path / "demands", KNOWN, "sample", answers=answers, **unprotected)
    asked = [
        finish(place, 1, 2),
        EvaluateRequest(**stamp(place, task=1, round=1, num_classes=2), arrays=model(place, 2), tables=True),
    ]
    site = place.site

    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("something was computed")

    for name in ("choose_exemplars", "score_held_out", "own_class_means"):
        monkeypatch.setattr(f"perennial.client.handlers.{name}", computed)
    for answer, request in zip((answer_finish_task, answer_evaluate), asked, strict=True):
        with pytest.raises(PolicyRefusal, match="this site demands 'sample'"):
            answer(site, request)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("perennial.client.site.open_site", computed)
    for request in asked:
        assert told(place, request)[1].startswith("policy: policy.require_privacy: this site demands")
    assert versions(place) == []


@pytest.mark.parametrize("count", [19, 20])
def test_a_budget_that_covers_nothing_without_noise_says_so_before_anything_is_counted(
    tmp_path: Path, count: int
) -> None:
    """Where the ledger refuses what has no noise, the floor must not have spoken before: 19 right, or 20."""
    table = rows(60, "well") + [[f"{place}.5", "11.5", "ill"] for place in range(count)]
    policy = {"answers": ["train", "evaluate"], "max_epsilon": 9.0, "min_samples": 20}
    changes: dict[str, Any] = {
        "data": TABLE | {"test_fraction": 0.9},
        "tasks": NATURAL,
        "privacy": {"mode": "none"},
        "evaluation": {"federated": True},
        "model": {"name": "mlp", "hidden": [4, 4, 4, 4], "norm": "none"},
    }
    place = Hospital(tmp_path / "budget", policy, write_table(tmp_path / "budget", table), **changes)
    asked = EvaluateRequest(**stamp(place), arrays=Tensors(place.arrays()))
    for request in (asked, TrainRequest(**stamp(place), arrays=Tensors(place.arrays()))):
        kind, refusal, _, spent = told(place, request)
        assert (kind, spent) == ("NoneType", [])
        assert refusal.startswith("policy: policy.max_epsilon: no budget covers what has no noise"), refusal


def test_features_that_are_not_finite_are_the_farthest() -> None:
    features = nn.functional.normalize(torch.randn(7, 3, generator=torch.Generator().manual_seed(1)))
    hashes = torch.arange(7).numpy()
    for name in ("herding", "nearest"):
        memory = Memory(selection=name, per_class=7)  # pyright: ignore[reportArgumentType]
        whole = select_exemplars(memory, hashes[:6], features[1:], 7)
        spoilt = features.clone()
        spoilt[0, 1] = torch.nan
        assert select_exemplars(memory, hashes, spoilt, 7).tolist() == [*(whole + 1).tolist(), 0]
        assert select_exemplars(memory, hashes, spoilt, 2).tolist() == (whole + 1)[:2].tolist()
        assert select_exemplars(memory, hashes[:2], features[:2] * torch.nan, 1).tolist() == [0]


def test_one_sample_alone_is_no_error_where_noise_hides_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = nn.BatchNorm1d(2).eval().requires_grad_(False)
    assert find_fewest_samples(nn.Sequential(frozen)) == 2 and find_fewest_samples(nn.Linear(2, 2)) == 1
    # networks with batch normalisation come from a file alone; what matters is what they need
    for where in ("perennial.client.training_turn", "perennial.learning.training"):
        monkeypatch.setattr(f"{where}.find_fewest_samples", lambda model: 2)
    found = []
    for count in (0, 1, 2):
        table = rows(60, "well") + [[f"{place}.5", "11.5", "ill"] for place in range(count)]
        place = hospital(tmp_path / str(count), table, "client_local", privacy=LOCAL, tasks=NATURAL)
        found.append(told(place, TrainRequest(**stamp(place), arrays=Tensors(place.arrays()))))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == "TrainReply", found[0]


def test_nothing_leaves_and_no_file_comes_back_after_a_withdrawal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = hospital(tmp_path / "withdraws", rows(40), privacy=SAMPLE)
    state, trained = Path(place.config.state_dir), TrainingTurn._train  # pyright: ignore[reportPrivateUsage]

    def withdrawn(turn: TrainingTurn) -> Any:
        found = trained(turn)
        consent.withdraw(state, RUN)
        # what another part of the work still writes
        turn.site.state(RUN).put("own", 1, {"w": torch.zeros(1)}, {})
        return found

    monkeypatch.setattr(TrainingTurn, "_train", withdrawn)
    request = TrainRequest(**stamp(place), arrays=Tensors(place.arrays()))
    kind, refusal, _, spent = told(place, request)
    assert kind == "NoneType" and refusal == f"error: {AFTER_DATA}" and len(spent) == 1
    assert not (state / "runs" / RUN).exists()
    assert "has withdrawn from this run" in told(place, request)[1]
