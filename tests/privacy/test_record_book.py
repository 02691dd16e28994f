"""The sets of records that a run's tasks held, and which releases of a run count as disjoint."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.foundation.errors import PrivacyError, StateError
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.privacy.record_book import Ids, RecordBook, as_ids, count_times
from tests.privacy.budgets import budget_for

KEY = bytes(32)


def ids(names: str) -> Ids:
    """One id of 16 bytes for each letter; some end in zeros, which text of NumPy would drop."""
    rows = [name.encode() + bytes(14) + (b"\0" if name < "m" else b"\1") for name in names]
    return as_ids(np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 16))


def release(task: int, scope: str = "one", **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "run": "r",
        "experiment": "e",
        "recipient": "server",
        "kind": "statistics",
        "unit": "sample",
        "relation": "add_remove",
        "mechanism": "gaussian",
        "noise_multiplier": 2.0,
        "sample_rate": 1.0,
        "steps": 1,
        "part": f"{scope}/task {task}",
    }
    return Entry(**values | changes)


def charge(folder: Path, entry: Entry, names: str) -> Entry:
    noted = RecordBook(folder, KEY).note(entry, ids(names))
    Ledger(folder).charge(noted)
    return noted


def held(folder: Path, task: int, names: str, scope: str = "one") -> dict[str, list[list[int]]]:
    """How often the sets of the run's other tasks hold each of these."""
    found = RecordBook(folder, KEY).read_other_parts(release(task, scope), Ledger(folder).totals())
    return {part: [count_times(each, ids(names)).tolist() for each in sets] for part, sets in found.items()}


def test_a_set_says_how_often_each_content_was_there(tmp_path: Path) -> None:
    charge(tmp_path, release(1), "abxaa")
    charge(tmp_path, release(1, noise_multiplier=3.0), "b")
    charge(tmp_path, release(2), "c")
    charge(tmp_path, release(3), "")
    charge(tmp_path, release(1, "other run"), "abc")
    assert held(tmp_path, 2, "abcx") == {"one/task 1": [[3, 1, 0, 1], [0, 1, 0, 0]], "one/task 3": [[0] * 4]}
    assert held(tmp_path, 1, "ac", "other run") == {}
    assert RecordBook(tmp_path, KEY).read_other_parts(release(1, part=""), Ledger(tmp_path).totals()) == {}


@pytest.mark.parametrize("lost", ["book", "set", "changed set", "older book"])
def test_a_task_whose_records_are_not_known_keeps_the_others_back(lost: str, tmp_path: Path) -> None:
    charge(tmp_path, release(1), "ab")
    shutil.copy(tmp_path / "records" / "book.sqlite", tmp_path / "older")
    last = tmp_path / "records" / "sets" / charge(tmp_path, release(1), "bc").records
    assert held(tmp_path, 2, "abc")
    if lost == "book":
        (tmp_path / "records" / "book.sqlite").unlink()
    elif lost == "set":
        last.unlink()
    elif lost == "changed set":
        last.write_bytes(ids("x").tobytes())
    else:
        shutil.copy(tmp_path / "older", tmp_path / "records" / "book.sqlite")
    with pytest.raises(StateError, match="take part in a new run"):
        held(tmp_path, 2, "abc")
    assert held(tmp_path, 1, "abc") == {} == held(tmp_path, 2, "abc", "other run")


def test_a_kill_before_the_ledger_s_line_leaves_a_set_and_no_charge(tmp_path: Path) -> None:
    RecordBook(tmp_path, KEY).note(release(1), ids("a"))
    assert Ledger(tmp_path).read_entries() == () and held(tmp_path, 2, "a") == {"one/task 1": [[1]]}


def test_a_set_that_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "sets").write_text("in the way")
    with pytest.raises(StateError):
        RecordBook(tmp_path, KEY).note(release(1), ids("a"))
    assert held(tmp_path, 2, "a") == {}


def test_nothing_of_a_set_stands_in_the_ledger_without_the_site_s_key(tmp_path: Path) -> None:
    names = [RecordBook(tmp_path, key).note(release(1), ids("ab")).records for key in (KEY, bytes([1]) * 32)]
    assert len(names[0]) == 64 and names[0] != names[1]


DISJOINT_PARTS_DELTA = 1e-5
MULTIPLIER = 2.0


def ordered(first: int) -> Experiment:
    """Ten tasks of one class of a hospital's table, beginning with another class in each experiment."""
    names = [f"outcome {label}" for label in range(10)]
    order = [names[(first + place) % 10] for place in range(10)]
    return Experiment.model_validate(
        {
            "name": f"order-{first}",
            "data": {"source": "csv", "path": "visits.csv", "classes": names, "sites": 3},
            "tasks": {"count": 10, "rounds": 1, "order": order},
            "model": {"name": "features", "features": [{"name": "random", "width": 8}]},
            "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01},
            "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": MULTIPLIER},
            "evaluation": {"federated": False},
        }
    )


def releases_of_one_class() -> list[Entry]:
    """Class 0 is in task 1 of the first experiment, task 10 of the second, and so on: ten releases of it."""
    return [
        charges.price_sums(ordered(first), f"{first:016x}", 1 + (0 - first) % 10).entry for first in range(10)
    ]


def test_ten_orders_of_one_class_cost_ten_releases(tmp_path: Path) -> None:
    """The attack of the trials: ledger 2.17, truth 8.08."""
    truth = compose(
        [Entry.of_sums(ordered(0).privacy, run="r", experiment="e", recipient="server", task=1)] * 10,
        DISJOINT_PARTS_DELTA,
    )
    ledger = Ledger(tmp_path)
    for entry in releases_of_one_class():
        ledger.charge(entry)
    assert ledger.cost(DISJOINT_PARTS_DELTA).epsilon == pytest.approx(truth.epsilon)
    assert truth.epsilon > 3 * compose(releases_of_one_class()[:1], DISJOINT_PARTS_DELTA).epsilon


def test_the_limit_notices_another_order(tmp_path: Path) -> None:
    limit = budget_for(releases_of_one_class()[:1], DISJOINT_PARTS_DELTA)
    ledger = Ledger(tmp_path)
    first, second = releases_of_one_class()[:2]
    ledger.charge(first, limit)
    with pytest.raises(PrivacyError, match="max_epsilon"):
        ledger.charge(second, limit)
    # tasks of the run that has released already hold other records
    ledger.charge(charges.price_sums(ordered(0), first.run, 2).entry, limit)


def test_a_run_s_token_is_no_proof_that_the_experiment_is_the_same(tmp_path: Path) -> None:
    """The server draws the token, so two experiments can have one."""
    same_token = [charges.price_sums(ordered(first), "0" * 16, 1 + first).entry for first in range(2)]
    assert (
        compose(same_token, DISJOINT_PARTS_DELTA).epsilon
        == compose([same_token[0]] * 2, DISJOINT_PARTS_DELTA).epsilon
    )


def test_lines_of_the_first_version_count_for_every_record(tmp_path: Path) -> None:
    """They name a task and no run, so nothing says what is disjoint."""

    def old(task: int) -> Entry:
        found = charges.price_sums(ordered(0), "0" * 16, task).entry
        return Entry.from_json(found.to_json() | {"part": f"task {task}"})

    assert (
        compose([old(1), old(2)], DISJOINT_PARTS_DELTA).epsilon
        == compose([old(1)] * 2, DISJOINT_PARTS_DELTA).epsilon
    )
