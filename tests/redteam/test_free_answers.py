"""A server that learns from whether, and how, a protected site answers, or from numbers in its requests.

Each attack was run against a site of its own table; the pairs of tables differ in one record.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.app import HANDLERS
from perennial.client.plan import FREE, Plan, is_number
from perennial.client.release import AFTER_DATA
from perennial.client.training_samples import find_training_indices
from perennial.config.strategies import ASKS
from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.privacy.accountants import solve_gaussian_multiplier
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import (
    EvaluateReply,
    EvaluateRequest,
    FinishTaskRequest,
    SparsityRequest,
    TrainRequest,
)
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.corrected import CorrectionOrder
from perennial.strategies.serial_ring.site import Turn
from tests.redteam.attacked_hospital import BASE, SUMS, TABLE, Hospital, rows, write_table

SAMPLE = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.2}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 8.0}
CLUSTERS = {
    "name": "clustered_personalisation",
    "base": "fedavg",
    "global_rounds": 1,
    "clusters": 2,
    "sparsity_epsilon": 1.0,
    "personal": [],
    "layers": 4,
}
DEEP = {"name": "mlp", "hidden": [8, 8, 8, 8], "norm": "none"}
ANSWERS = ("train", "sparsity", "statistics", "evaluate")
TARGET = [["11.5", "11.5", "ill"]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def hospital(
    folder: Path,
    table: list[list[str]],
    demanded: str = "sample",
    floor: int | None = None,
    answers: Sequence[str] = ANSWERS,
    **changes: Any,
) -> Hospital:
    policy: dict[str, Any] = {"answers": [*answers], "require_privacy": demanded}
    # a floor of noised counts is met or not by chance
    policy |= {"max_epsilon": 40.0, "min_samples": floor or (1 if "evaluation" in changes else 20)}
    usual: dict[str, Any] = {
        "data": TABLE,
        "tasks": {"count": 1, "rounds": 2},
        "evaluation": {"federated": False},
    }
    usual |= {"model": DEEP, "privacy": SAMPLE}
    return Hospital(folder, policy, write_table(folder, table), **usual | changes)


def stamp(place: Hospital, **fields: Any) -> dict[str, Any]:
    return place.stamp() | {"split_key": "0" * 64} | fields


def overflowing(place: Hospital) -> Tensors:
    """A model whose fourth activation is NaN for the target alone."""
    arrays = {name: tensor.zero_() for name, tensor in place.arrays().items()}
    weights = [name for name in arrays if name.startswith("backbone") and name.endswith("weight")]
    biases = [name for name in arrays if name.startswith("backbone") and name.endswith("bias")]
    arrays[weights[0]][0] = torch.tensor([1.0, 0.0, 1.0, 0.0]) * 1e10
    arrays[biases[0]][0] = -20e10
    arrays[weights[1]][0, 0], arrays[weights[2]][0, 0] = 1e15, 1e18
    return Tensors(arrays)


def told(place: Hospital, request: Stamp) -> tuple[Any, ...]:
    """Whether there is a reply, its text and shapes, and what the ledger was charged."""
    place.refusal = ""
    reply = place.ask(request)
    shapes = {} if reply is None else _shapes(reply)
    ledger = place.config.ledger
    spent = (
        [(e.kind, e.noise_multiplier, e.relation) for e in ledger.read_entries()] if ledger.started else []
    )
    return type(reply).__name__, place.refusal, shapes, spent


def _shapes(reply: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": read_kind(reply.to_record())}
    for field in fields(reply):
        value = getattr(reply, field.name)
        if isinstance(value, Tensors):
            found[field.name] = {name: tuple(tensor.shape) for name, tensor in value.items()}
        elif isinstance(value, list):
            found[field.name] = len(value)
    return found


def sparsity(place: Hospital) -> Stamp:
    return SparsityRequest(**stamp(place), arrays=overflowing(place))


def update(place: Hospital) -> Stamp:
    return TrainRequest(**stamp(place), arrays=overflowing(place))


def finish(place: Hospital) -> Stamp:
    return FinishTaskRequest(**stamp(place), arrays=overflowing(place))


def evaluation(place: Hospital) -> Stamp:
    arrays = {name: tensor.zero_() for name, tensor in place.arrays().items()}
    return EvaluateRequest(**stamp(place), arrays=Tensors(arrays))


NATURAL = {"count": 2, "rounds": 1, "order": "natural"}
HERDING: dict[str, Any] = {
    "privacy": LOCAL,
    "tasks": NATURAL,
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.1},
        "memory": {"selection": "herding", "per_class": 3},
        "distillation": {"weight": 1.0},
    },
}
COUNTED: dict[str, Any] = SUMS | {"data": TABLE | {"test_fraction": 0.3}}


@pytest.mark.parametrize(
    ("request_of", "known", "demanded", "changes"),
    [
        (sparsity, rows(60), "sample", {"strategy": CLUSTERS}),
        (update, rows(60), "sample", {}),
        (update, rows(60), "client_local", {"privacy": LOCAL}),
        # exactly at the floor, and one below
        (update, rows(19), "sample", {}),
        (update, rows(19), "client_local", {"privacy": LOCAL}),
        # none of the task's class, and one
        (update, rows(60, "well"), "sample", {"tasks": NATURAL}),
        (update, rows(60, "well"), "client_local", {"privacy": LOCAL, "tasks": NATURAL}),
        (update, rows(60, "well"), "sample", {"tasks": NATURAL, "privacy": SAMPLE | {"bayesian": True}}),
        (sparsity, rows(19), "sample", {"strategy": CLUSTERS}),
        (finish, rows(120), "client_local", HERDING),
        (update, rows(39), "client_local", {"privacy": LOCAL, "pretraining": {"samples": 40, "rounds": 1}}),
        (evaluation, rows(160, "well"), "sample", COUNTED),
    ],
)
def test_one_record_decides_neither_reply_nor_text_nor_charge(
    tmp_path: Path, request_of: Any, known: list[list[str]], demanded: str, changes: dict[str, Any]
) -> None:
    found = []
    for name, table in (("without", known), ("with", known + TARGET)):
        place = hospital(tmp_path / name, table, demanded, **changes)
        found.append(told(place, request_of(place)))
    assert found[0] == found[1]
    assert found[0][0] != "NoneType", found[0][1]


def test_a_zero_head_is_answered_and_a_failing_own_head_stays_here(tmp_path: Path) -> None:
    place = hospital(tmp_path / "both", rows(160), **COUNTED)
    assert isinstance(place.ask(evaluation(place)), EvaluateReply), place.refusal


def test_the_noise_on_a_vector_is_the_experiments_and_its_scale_tells_no_number(tmp_path: Path) -> None:
    place = hospital(tmp_path / "noise", rows(60), strategy=CLUSTERS | {"layers": 1})
    (entry,) = told(place, sparsity(place))[3]
    assert entry == ("sparsity", solve_gaussian_multiplier(1.0, 1e-5), "add_remove")
    assert not {"epsilon", "delta", "channels", "layers"} & {field.name for field in fields(SparsityRequest)}


def test_an_error_after_the_data_were_read_is_charged_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("412 rows")

    monkeypatch.setattr("perennial.learning.private_training.train_privately", failing)
    place = hospital(tmp_path / "fails", rows(60))
    for asked in range(1, 4):
        _, refusal, _, spent = told(place, update(place))
        assert refusal == f"error: {AFTER_DATA}" and len(spent) == asked


def numbers() -> Iterator[tuple[type[Stamp], str]]:
    for kind in HANDLERS:
        for field in fields(kind):  # pyright: ignore[reportArgumentType]
            if issubclass(kind, Stamp) and ("int" in str(field.type) or "float" in str(field.type)):
                yield kind, field.name


@pytest.mark.parametrize(("kind", "name"), [*numbers()])
def test_a_request_changes_no_number_of_the_approved_experiment(
    tmp_path: Path, kind: type[Stamp], name: str
) -> None:
    """Each number of each kind of request is the experiment's, or in the list of those that are free."""
    assert name in FREE or name in ("task", "round", "num_classes")
    if name in FREE or kind.message_type.rpartition(".")[2] in ("vote", "open"):
        return
    place = hospital(tmp_path / "numbers", rows(30), strategy=CLUSTERS)
    plan = Plan(place.experiment, place.site.process.registry)
    bare = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(bare, field.name, stamp(place).get(field.name))
    object.__setattr__(bare, name, 7)
    assert is_number([None, 7]) and not is_number(True)
    with pytest.raises(PolicyRefusal, match=name):
        plan.check(bare)


IN_SETTINGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "turn": (Turn, "serial_ring", {"sweep": 1, "segments": 4}),
    "correction": (CorrectionOrder, "scaffold", {"name": "scaffold", "folded": 0}),
    "personal": (None, "fedper", {}),
}
"""By the first part of a key: its type, a strategy that orders by it, and an order. Names have no number."""


@pytest.mark.parametrize("key", sorted({key for asks in ASKS.values() for key in asks.setting_keys}))
def test_neither_do_the_numbers_of_an_order(tmp_path: Path, key: str) -> None:
    kind, name, order = IN_SETTINGS[key]
    plain: dict[str, Any] = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "schedule": "constant"}
    changes: dict[str, Any] = {"privacy": LOCAL, "learner": {"preset": "none", "optimizer": plain}}
    place = hospital(tmp_path / key, rows(30), strategy={"name": name}, **changes)
    plan = Plan(place.experiment, place.site.process.registry)

    def asked(**numbers: int) -> TrainRequest:
        settings = json.dumps({key: order | numbers})
        return TrainRequest(**stamp(place), arrays=Tensors(place.arrays()), settings=settings)

    numbers = [] if kind is None else [n for n, f in kind.model_fields.items() if f.annotation is int]
    assert bool(numbers) == (kind is not None)
    for number in numbers:
        assert plan.check(asked()) == "train"
        for wrong in (-1, 7, 10**9):
            with pytest.raises((PolicyRefusal, ProtocolError), match=rf"settings\.{key}"):
                plan.check(asked(**{number: wrong}))


def test_an_exemplar_does_not_decide_whether_its_classs_later_records_are_exemplars(tmp_path: Path) -> None:
    """The server chooses whom a share keeps, by the split key, and sends the former model when it likes."""
    others = [[f"{place / 9:.3f}", "3.0", "b"] for place in range(20)]
    new = [[f"{place / 9:.3f}", "1.0", "cd"[place % 2]] for place in range(20)]
    late = [[f"{3 + place / 50:.3f}", "-3.0", "a"] for place in range(30)]
    chosen: list[set[tuple[float, ...]]] = []
    for folder, first in (("with", [["5.0", "-2.0", "a"], *others, *new]), ("without", [*others, *new])):
        place = hospital(
            tmp_path / folder,
            first,
            data=TABLE | {"classes": ["a", "b", "c", "d"]},
            tasks={"count": 2, "rounds": 1, "order": "natural"},
            learner={**BASE["learner"], "memory": {"selection": "random", "share": 0.9}},
        )
        sent = Tensors(place.arrays())
        assert place.ask(FinishTaskRequest(**stamp(place), arrays=sent)), place.refusal
        write_table(tmp_path / folder, [*first, *late])
        request = TrainRequest(**stamp(place, task=2, round=2, num_classes=4), arrays=sent)
        rows_of, _ = find_training_indices(place.site, request, ("0" * 64, dict(sent)))
        chosen.append({tuple(place.site.data.x[row].tolist()) for row in rows_of.tolist()})
    assert len(chosen[1]) > 50 and chosen[1] <= chosen[0] and len(chosen[0] - chosen[1]) <= 1
