"""A hospital with a table of its own: which of its records are in a release, and who pays."""

import hashlib
import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from perennial.client.training_samples import choose
from perennial.config import charges
from perennial.foundation.errors import DataError
from perennial.models.feature_maps.projection import RADIUS_SQUARED
from perennial.privacy.composition import compose
from perennial.privacy.ledger import Ledger
from perennial.privacy.noised_sums import BLOCKS, STEPS, compute_sensitivity
from perennial.privacy.released import Mechanism
from perennial.protocol.messages import StatisticsReply, StatisticsRequest, TrainReply, TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic.site import collect_sums
from tests.privacy.budgets import budget_for
from tests.privacy.test_record_book import release
from tests.redteam.attacked_hospital import SUMS, TABLE, Hospital, rows, write_table

SPLIT_KEY = "0" * 64
NOISE = 4.0
EXPERIMENT: dict[str, Any] = SUMS | {
    "data": TABLE,
    "tasks": {"count": 2, "rounds": 1, "order": "natural"},
    "privacy": SUMS["privacy"] | {"noise_multiplier": NOISE},
    "evaluation": {"federated": False},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def hospital(folder: Path, epsilon: float, **changes: Any) -> Hospital:
    policy = {"answers": ["statistics"], "require_privacy": "sample", "max_epsilon": epsilon}
    own = {"source": "csv", "path": str(folder / "visits.csv")}
    return Hospital(folder, policy, own, **EXPERIMENT | changes)


def ask(place: Hospital, task: int, run: str = "0" * 16) -> Any:
    place.refusal = ""
    stamp = place.stamp(task) | {"run": run, "task": task, "num_classes": task, "split_key": SPLIT_KEY}
    features = place.site.models.load_fixed_features().content
    return place.ask(StatisticsRequest(**stamp, of_task=task, features=features))


def one_release() -> float:
    """The budget into which one release fits, and no second one of the same records."""
    from perennial.config import charges
    from perennial.config.experiment import Experiment

    content = {"name": "x"} | {key: value for key, value in EXPERIMENT.items() if value is not None}
    entry = charges.price_sums(Experiment.model_validate(content), "r", 1).entry
    return 1.1 * budget_for([entry], 1e-5).epsilon


def times_noted(folder: Path) -> list[int]:
    """In how many sets of released tasks each record is, of those that are in any; sorted."""
    place = Ledger(folder / "state")
    names = [entry.records for entry in place.read_entries()]
    sets = [(folder / "state" / "records" / "sets" / name).read_bytes() for name in names]
    members = [text[at : at + 16] for text in sets for at in range(0, len(text), 16)]
    return sorted(members.count(member) for member in {*members})


def test_every_release_names_its_records(tmp_path: Path) -> None:
    write_table(tmp_path, rows())
    place = hospital(tmp_path, one_release())
    for task in (1, 2):
        assert isinstance(ask(place, task), StatisticsReply), place.refusal
    assert times_noted(tmp_path) == [1] * 40
    # tasks of one run are disjoint, by public facts; the same records in another run are not
    assert ask(place, 1, run="1" * 16) is None and "policy.max_epsilon" in place.refusal
    assert times_noted(tmp_path) == [1] * 40


def test_a_record_that_changed_its_label_is_left_out_in_silence(tmp_path: Path) -> None:
    """By public facts it is in one task of the run; the site knows that it was in the other one too."""
    table = rows()
    write_table(tmp_path, table)
    place = hospital(tmp_path, one_release())
    first = ask(place, 1)
    assert isinstance(first, StatisticsReply), place.refusal
    wrong = [row for row in table if row[2] == "ill"][:3]
    for row in wrong:
        row[2] = "well"
    write_table(tmp_path, [row for row in table])
    place = hospital(tmp_path, 3 * one_release())
    second = ask(place, 2)
    assert isinstance(second, StatisticsReply)
    assert set(second.statistics) == set(first.statistics)
    assert [second.statistics[name].shape for name in second.statistics] == [
        first.statistics[name].shape for name in first.statistics
    ]
    assert int(clear_sums(place, 2)["counts"].sum()) == 20, "who was in task 1 is in no other task of the run"
    assert times_noted(tmp_path) == [1] * 17 + [2] * 20 + [3] * 3, "a set holds all rows of its task"


def test_that_all_records_are_left_out_does_not_show(tmp_path: Path) -> None:
    table = [row for row in rows() if row[2] == "ill"]
    write_table(tmp_path, table)
    first = ask(hospital(tmp_path, one_release()), 1)
    write_table(tmp_path, [[*row[:2], "well"] for row in table])
    second = ask(hospital(tmp_path, one_release()), 2)
    assert isinstance(first, StatisticsReply) and isinstance(second, StatisticsReply)
    assert second.statistics["counts"].abs().sum() > 0, "there is noise where nobody is"
    assert int(clear_sums(hospital(tmp_path, 3 * one_release()), 2)["counts"].sum()) == 0


def test_a_task_without_a_record_is_charged_to_nobody(tmp_path: Path) -> None:
    """Else one record of task 1 would decide whether all records of task 2 have paid for it."""
    table = [row for row in rows() if row[2] == "well"]
    for name, first in (("without", []), ("with", [["1.5", "1.25", "ill"]])):
        write_table(tmp_path / name, [*first, *table])
        place = hospital(tmp_path / name, one_release())
        assert isinstance(ask(place, 1), StatisticsReply), place.refusal
        assert int(clear_sums(place, 2)["counts"].sum()) == 20, name


def clear_sums(place: Hospital, task: int) -> dict[str, torch.Tensor]:
    """The sums of a task that this site would release, without their noise."""
    site = place.site
    classes = site.process.registry.schedule.list_classes(task)
    mechanism = charges.price_sums(site.experiment, "0" * 16, task)
    kept = choose(site, mechanism, lambda: site.data.find_task_indices("train", classes.start, classes.stop))
    sums = collect_sums(site, site.models.load_fixed_features(), classes, kept)
    return {"gram": sums.gram, "sums": sums.sums, "counts": sums.counts}


def moved(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], width: int = 12) -> float:
    """L2 distance of two weighted releases, in units of a record's greatest length."""
    gram, sums, counts = ((second[name] - first[name]).double() for name in ("gram", "sums", "counts"))
    twice = torch.full_like(gram, 2.0)
    twice[[row * width - row * (row - 1) // 2 for row in range(width)]] = 1.0
    a, b, c = BLOCKS
    products = a * float((gram.square() * twice).sum().sqrt()) / STEPS**2 / RADIUS_SQUARED
    return math.hypot(
        products, b * float(sums.norm()) / STEPS / math.sqrt(RADIUS_SQUARED), c * float(counts.norm())
    )


def test_one_more_row_of_a_known_content_moves_the_sums_by_what_is_charged(tmp_path: Path) -> None:
    """Under another label too; it moved them by 1.442 where 1.136 is charged."""
    table = rows()
    tasks = {"tasks": {"count": 1, "rounds": 1, "order": "natural"}}
    found = []
    for name, more in (("before", []), ("after", [[*table[0][:2], "ill"]])):
        write_table(tmp_path / name, [*more, *table])
        policy = {"answers": ["statistics"], "require_privacy": "sample", "max_epsilon": 9.0}
        own = {"source": "csv", "path": str(tmp_path / name / "visits.csv")}
        found.append(clear_sums(Hospital(tmp_path / name, policy, own, **EXPERIMENT | tasks), 1))
    assert 0 < moved(*found) <= compute_sensitivity(12)


@pytest.mark.parametrize("name", ["visits.csv", "export of march.csv"])
def test_an_export_made_anew_gives_no_budget_back(tmp_path: Path, name: str) -> None:
    """Sorted otherwise, renamed, labelled anew and longer: who was in task 1 is in no other task."""
    table = [*rows(), *rows()[:5]]
    write_table(tmp_path, table)
    assert isinstance(ask(hospital(tmp_path, one_release()), 1), StatisticsReply)
    draw = np.random.default_rng(1)
    ill = [row for row in table if row[2] == "ill"]
    again = [*([*row[:2], "well"] for row in ill), *(row for row in table if row[2] == "well")]
    fresh = [[f"{draw.normal():.6f}", f"{draw.normal():.6f}", "well"] for _ in range(7)]
    write_table(tmp_path, [*draw.permutation(again).tolist(), *fresh])
    (tmp_path / "visits.csv").rename(tmp_path / name)
    policy = {"answers": ["statistics"], "require_privacy": "sample", "max_epsilon": one_release()}
    wider = Hospital(tmp_path, policy, {"source": "csv", "path": str(tmp_path / name)}, **EXPERIMENT)
    assert int(clear_sums(wider, 2)["counts"].sum()) == len(table) - len(ill) + len(fresh)


def test_without_a_budget_too_the_ledger_says_what_each_record_cost(tmp_path: Path) -> None:
    """Tasks of one run count once, because no record is in two of them; another run counts again."""
    write_table(tmp_path, rows())
    policy = {"answers": ["statistics"]}
    own = {"source": "csv", "path": str(tmp_path / "visits.csv")}
    for run in ("0" * 16, "1" * 16):
        assert isinstance(ask(Hospital(tmp_path, policy, own, **EXPERIMENT), 1, run), StatisticsReply)
    write_table(tmp_path, [[*row[:2], "well"] for row in rows()])
    assert int(clear_sums(Hospital(tmp_path, policy, own, **EXPERIMENT), 2)["counts"].sum()) == 20
    ledger = Ledger(tmp_path / "state")
    first = ledger.read_entries()[0]
    assert ledger.cost(1e-5).epsilon == compose([first, first], 1e-5).epsilon


def test_nothing_of_the_records_is_in_what_leaves_or_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path, rows())
    place = hospital(tmp_path, one_release())
    reply = ask(place, 1)
    key = (tmp_path / "state" / "records" / "key").read_bytes()
    line = json.loads((tmp_path / "state" / "ledger.jsonl").read_text().splitlines()[-1])
    name = line["records"]
    held = np.frombuffer((tmp_path / "state" / "records" / "sets" / name).read_bytes(), dtype="S16")
    told = repr(reply.to_record()).encode() + caplog.text.encode()
    for secret in (key, key.hex().encode(), name.encode(), *(i.hex().encode() for i in held.tolist())):
        assert secret not in told


def test_a_release_of_all_data_names_no_set(tmp_path: Path) -> None:
    """Every record pays for it, whoever was in it."""
    training = {
        "model": {"name": "mlp", "hidden": [4], "norm": "none"},
        "tasks": {"count": 1, "rounds": 2},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "batch_size": 4},
        "strategy": "fedavg",
        "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.1},
    }
    write_table(tmp_path, rows())
    policy = {"answers": ["train"], "require_privacy": "sample", "max_epsilon": 8}
    place = Hospital(
        tmp_path, policy, {"source": "csv", "path": str(tmp_path / "visits.csv")}, **EXPERIMENT | training
    )
    stamp: dict[str, Any] = place.stamp(1) | {"split_key": SPLIT_KEY}
    assert isinstance(place.ask(TrainRequest(**stamp, arrays=Tensors(place.arrays()))), TrainReply), (
        place.refusal
    )
    assert [entry.records for entry in Ledger(tmp_path / "state").read_entries()] == [""]
    assert not (tmp_path / "state" / "records" / "sets").exists()


# One record more or less, now or in the past, moves a later release by one row. The histories have three
# tasks and few contents, so that most rows have twins.

Row = tuple[int, str, int]
"""Who it is, its content, its label."""


class Trial:
    """As much of a site as choose() sees: rows in a list, and classes in tasks of `width`."""

    def __init__(self, folder: Path, width: int) -> None:
        self.now: list[Row] = []
        self.held_out = set[int]()
        self.fails = False
        policy = SimpleNamespace(limit=None)
        self.identity: Any = SimpleNamespace(
            deployed=True, state_dir=folder, ledger=Ledger(folder), policy=policy
        )
        self.experiment: Any = SimpleNamespace(privacy=SimpleNamespace(enabled=True))
        schedule = SimpleNamespace(list_classes=lambda task: range(width * (task - 1), width * task))
        self.process: Any = SimpleNamespace(registry=SimpleNamespace(schedule=schedule))
        self.data, self.list_classes = self, schedule.list_classes

    def hash_contents(self, at: torch.Tensor) -> np.ndarray:
        content = [hashlib.sha256(self.now[row][1].encode()).digest() for row in at.tolist()]
        return np.frombuffer(b"".join(content), dtype=np.uint8).reshape(-1, 32)

    @property
    def y(self) -> torch.Tensor:
        return torch.tensor([row[2] for row in self.now], dtype=torch.int64)

    def find_task_indices(self, part: str, low: int, high: int) -> torch.Tensor:
        return torch.tensor(
            [at for at, row in enumerate(self.now) if low <= row[2] < high and row[0] not in self.held_out],
            dtype=torch.int64,
        )

    def released(self, task: int) -> Counter[tuple[str, int]]:
        """Contents and labels that a release of the task is computed from."""
        classes = self.list_classes(task)

        def find() -> torch.Tensor:
            if self.fails:
                raise DataError("these rows cannot be read")
            return self.find_task_indices("train", classes.start, classes.stop)

        try:
            kept = choose(self, Mechanism(release(task)), find)  # pyright: ignore[reportArgumentType]
        except DataError:
            return Counter()
        return Counter(self.now[row][1:] for row in kept.tolist())


def history(seed: int, width: int) -> list[tuple[int, list[Row], bool]]:
    """(task, all rows, whether an error comes): rows come, go, change their label, and are sorted anew."""
    draw = random.Random(seed)
    labels, count = 3 * width, draw.randint(2, 8)
    now: list[Row] = [(who, draw.choice("ab"), draw.randrange(labels)) for who in range(count)]
    found = []
    for task in [1, 2, 3, *draw.choices([1, 2, 3], k=2)]:
        found.append((task, list(now), draw.random() < 0.1))
        for _ in range(draw.randint(0, 4)):
            at = draw.randrange(len(now)) if now else 0
            change = draw.random()
            if now and change < 0.5:
                now[at] = (*now[at][:2], draw.randrange(labels))
            elif now and change < 0.7:
                del now[at]
            else:
                count += 1
                now.insert(at, (count, draw.choice("ab"), draw.randrange(labels)))
        draw.shuffle(now)
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("width", [1, 2])
def test_one_record_more_or_less_moves_each_release_by_one_row(seed: int, width: int, tmp_path: Path) -> None:
    steps = history(seed, width)
    draw = random.Random(seed)
    whoever = sorted({row for _, every, _ in steps for row in every})
    target = draw.choice(whoever)[0]
    its = [row for _, every, _ in steps for row in every if row[0] == target]
    steady = len(its) == len(steps) and len({*its}) == 1
    fails_with_it = draw.random() < 0.2
    both = Trial(tmp_path / "with", width), Trial(tmp_path / "without", width)
    for task, every, fails in steps:
        both[0].now, both[1].now = every, [row for row in every if row[0] != target]
        both[0].fails = fails or (fails_with_it and task == 1)
        both[1].fails = fails
        there, absent = (place.released(task) for place in both)
        if both[0].fails != both[1].fails:
            continue  # an error is an answer of its own; what it must not do is move the releases after it
        more, less = (there - absent).total(), (absent - there).total()
        if steady:
            own = its[0][2] in both[0].list_classes(task)
            assert less == 0 and more <= own, (task, there, absent)
        # which of two twins of two classes of a task came from another task, nobody can tell
        assert more + less <= 1 or (width > 1 and more == less == 1), (task, there, absent)


@pytest.mark.parametrize(
    "steps",
    [
        # labelled anew twice and erased: it is one row in the sets of two tasks
        [(1, [(0, "a", 0)]), (2, [(0, "a", 1)]), (3, [(1, "a", 2), (2, "a", 2)])],
        # it kept a twin out of task 2 and comes back: who was left out there must not decide who is in task 3
        [
            (1, [(0, "a", 0)]),
            (2, [(1, "a", 1), (2, "a", 1)]),
            (3, [(0, "a", 2), (1, "a", 2), (2, "a", 2)]),
        ],
    ],
)
def test_what_one_record_did_does_not_add_up(steps: list[tuple[int, list[Row]]], tmp_path: Path) -> None:
    both = Trial(tmp_path / "with", 1), Trial(tmp_path / "without", 1)
    for task, every in steps:
        both[0].now, both[1].now = every, [row for row in every if row[0] != 0]
        there, absent = (place.released(task) for place in both)
        assert ((there - absent) + (absent - there)).total() <= 1


def test_a_row_is_in_one_task_of_a_run_however_often_its_label_changes(tmp_path: Path) -> None:
    place, found = Trial(tmp_path, 1), Counter[int]()
    for task in (1, 2, 3):
        place.now = [(0, "a", task - 1), (1, "b", 1), (2, "b", 2)]
        for _, label in place.released(task).elements():
            found[label] += 1
    assert found == {0: 1, 1: 1, 2: 1}, "a in task 1 alone, each b under its own label"


def test_a_row_that_went_to_the_test_part_has_not_left_its_task(tmp_path: Path) -> None:
    """Another program spelled its number anew, and parts go by the text."""
    trial = Trial(tmp_path, width=1)
    trial.now = [(0, "40", 0), (1, "40", 1)]
    assert trial.released(1) == {("40", 0): 1}
    trial.held_out = {0}
    assert trial.released(2) == {("40", 1): 1}
    assert trial.released(1) == {}
    # one that is labelled anew has left it, whichever part its copies are in
    trial.now, trial.held_out = [(0, "40", 1), (1, "40", 1)], set()
    assert trial.released(2) == {("40", 1): 1}
