"""Each record pays for the releases that it was in: a hand case, and a slow accountant written apart."""

import math
import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.foundation.errors import PrivacyError, StateError
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.ledger_tip import guarantee
from perennial.privacy.record_book import BOOK, ChargedSet, Ids, Payments, RecordBook, as_ids
from perennial.privacy.spending import order_of
from tests.privacy.budgets import budget_for

KEY, DELTA = bytes(32), 1e-5


def ids(names: str) -> Ids:
    """One id of 16 bytes for each letter; some end in zeros, which text of NumPy would drop."""
    rows = [name.encode() + bytes(14) + (b"\0" if name < "m" else b"\1") for name in names]
    return as_ids(np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 16))


def gaussian(zcdp: float, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "run": "r",
        "experiment": "e",
        "recipient": "server",
        "kind": "statistics",
        "unit": "sample",
        "relation": "add_remove",
        "mechanism": "gaussian",
        "noise_multiplier": math.sqrt(1 / (2 * zcdp)) if zcdp else None,
        "sample_rate": 1.0,
        "steps": 1,
    }
    return Entry(**values | changes)


def limit_in_zcdp(most: float) -> Limit:
    """The limit that holds so much zero-concentrated privacy loss, and nothing more."""
    return budget_for([gaussian(most)], DELTA)


def released(book: RecordBook, ledger: Ledger, entry: Entry, names: str, limit: Limit | None = None) -> str:
    """Release from these records, as a site does; which of them were in it."""
    payments = book.payments(ledger)
    stays = np.ones(len(names), dtype=bool)
    if limit is not None:
        stays = payments.affordable(ids(names), limit, entry)
    kept = "".join(name for name, stay in zip(names, stays, strict=True) if stay)
    book.charge(ledger, entry, limit, ids(kept), payments.version)
    return kept


def paid(book: RecordBook, ledger: Ledger, limit: Limit, names: str) -> list[float]:
    """Zero-concentrated loss that each record has paid."""
    found, _ = book.payments(ledger).of(ids(names), limit, gaussian(1e-9))
    return [round(float(renyi) / order_of(limit.epsilon, limit.delta), 9) for renyi in found[:, 0]]


def test_the_hand_case(tmp_path: Path) -> None:
    """Costs 0.5 over {a, b}, 0.3 over {b, c}, 0.1 over all; then 0.5 over {a, b} in another experiment."""
    for folder, limit, last, costs in (
        ("limited", limit_in_zcdp(1.2), "a", [1.1, 0.9, 0.4]),
        ("free", None, "ab", [1.1, 1.4, 0.4]),
    ):
        ledger, book = Ledger(tmp_path / folder), RecordBook(tmp_path / folder, KEY)
        # the parts are those of one run each, so that no record that could exist is refused by public facts
        for place, (cost, names) in enumerate([(0.5, "ab"), (0.3, "bc"), (0.1, "abc")]):
            assert released(book, ledger, gaussian(cost, part=f"one/task {place}"), names, limit) == names
        another = gaussian(0.5, experiment="other", run="s", part="one/task 4")
        assert released(book, ledger, another, "ab", limit) == last
        assert len(ledger.entries()) == 4, "the server sees a release as always"
        assert paid(book, ledger, limit or limit_in_zcdp(5.0), "abc") == costs


# the slow accountant: everything from definitions, one record and one release at a time


@dataclass(frozen=True)
class Release:
    noise: float
    rate: float
    steps: int
    members: str


@cache
def divergence(order: float, noise: float, rate: float) -> float:
    """Renyi divergence of a Poisson-sampled Gaussian, integrated, the larger of both directions."""

    def log_density(at: float, mean: float) -> float:
        return -((at - mean) ** 2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))

    def plain(at: float) -> float:
        return log_density(at, 0)

    def mixed(at: float) -> float:
        if rate == 1:
            return log_density(at, 1)
        return float(np.logaddexp(math.log(1 - rate) + plain(at), math.log(rate) + log_density(at, 1)))

    found = []
    for over, under in ((mixed, plain), (plain, mixed)):
        value, _ = quad(
            lambda at, over=over, under=under: math.exp(order * over(at) + (1 - order) * under(at)),
            -15 * noise - 2 * order,
            15 * noise + 2 * order,
            limit=500,
        )
        found.append(math.log(value) / (order - 1))
    return max(found)


def slow_epsilon(history: Sequence[Release], order: float) -> float:
    total = sum(release.steps * divergence(order, release.noise, release.rate) for release in history)
    if not history:
        return 0.0
    return max(0.0, total + math.log((order - 1) / order) - (math.log(DELTA) + math.log(order)) / (order - 1))


MECHANISMS = [(noise, rate) for noise in (1.5, 3.0, 6.0) for rate in (0.2, 1.0)]


def history_of(seed: int) -> tuple[float, list[Release]]:
    """A limit, and releases over random sets of six records, drawn from a few mechanisms."""
    draw = random.Random(seed)
    limit = draw.choice([1.0, 3.0, 8.0])
    releases = []
    for _ in range(draw.randint(1, 9)):
        members = "".join(name for name in "abcxyz" if draw.random() < 0.6)
        noise, rate = draw.choice(MECHANISMS)
        releases.append(Release(noise, rate, draw.randint(1, 4), members))
    return limit, releases


def slowly(limit: float, releases: Sequence[Release]) -> list[str]:
    """Who is in each release when each record may pay no more than the limit."""
    order = order_of(limit, DELTA)
    taken: dict[str, list[Release]] = {name: [] for name in "abcxyz"}
    found = []
    for release in releases:
        kept = [n for n in release.members if slow_epsilon([*taken[n], release], order) <= limit]
        for name in kept:
            taken[name].append(release)
        found.append("".join(kept))
    return found


def entry_of(release: Release, place: int) -> Entry:
    return gaussian(
        0,
        noise_multiplier=release.noise,
        sample_rate=release.rate,
        steps=release.steps,
        part=f"run/{place}",
        experiment=str(place % 3),
    )


def test_hundreds_of_histories_agree_with_the_slow_accountant() -> None:
    left_out = 0
    for seed in range(300):
        epsilon, releases = history_of(seed)
        limit, sets, found = Limit(epsilon, DELTA, "sample"), [], []
        for place, release in enumerate(releases):
            entry = guarantee(entry_of(release, place))
            payments = Payments({}, tuple(sets), place)
            stays = payments.affordable(ids(release.members), limit, entry) if release.members else []
            found.append("".join(n for n, stay in zip(release.members, stays, strict=True) if stay))
            if found[-1]:
                sets.append(ChargedSet(ids(found[-1]), {entry: 1}))
        assert found == slowly(epsilon, releases), f"seed {seed}"
        left_out += sum(len(release.members) for release in releases) - sum(map(len, found))
    assert left_out > 150, "the histories must reach their limits"


@pytest.mark.parametrize("seed", range(8))
def test_histories_on_disk_agree_with_it_too_over_restarts(seed: int, tmp_path: Path) -> None:
    epsilon, releases = history_of(seed)
    limit, found = Limit(epsilon, DELTA, "sample"), []
    for place, release in enumerate(releases):
        ledger, book = Ledger(tmp_path), RecordBook(tmp_path, KEY)
        entry, payments = entry_of(release, place), book.payments(ledger)
        members = ids(release.members) if release.members else np.empty(0, dtype="S16")
        stays = payments.affordable(members, limit, entry) if release.members else []
        found.append("".join(n for n, stay in zip(release.members, stays, strict=True) if stay))
        book.charge(ledger, entry, None, members[np.array(stays, dtype=bool)], payments.version)
    assert found == slowly(epsilon, releases)
    assert len(Ledger(tmp_path).entries()) == len(releases)


def test_lines_of_earlier_versions_are_paid_by_every_record(tmp_path: Path) -> None:
    """They name no set; two tasks of one run counted as disjoint there, and nothing proves it."""
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(5.0)
    for task in (1, 2):
        ledger.charge(gaussian(0.5, part=f"task {task}"))
    released(book, ledger, gaussian(0.25), "a")
    assert paid(book, ledger, limit, "ab") == [1.25, 1.0]


@pytest.mark.parametrize("lost", ["book", "set", "changed set", "older book"])
def test_what_the_book_lacks_is_paid_by_every_record(lost: str, tmp_path: Path) -> None:
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(5.0)
    released(book, ledger, gaussian(0.5), "ab")
    older = tmp_path / "older"
    shutil.copy(tmp_path / "records" / "book.sqlite", older)
    released(book, ledger, gaussian(0.3), "bc")
    assert paid(book, ledger, limit, "abcx") == [0.5, 0.8, 0.3, 0.0]
    (last,) = [tmp_path / "records" / "sets" / ledger.entries()[1].records]
    if lost == "book":
        (tmp_path / "records" / "book.sqlite").unlink()
    elif lost == "set":
        last.unlink()
    elif lost == "changed set":
        last.write_bytes(ids("x").tobytes())
    else:
        shutil.copy(older, tmp_path / "records" / "book.sqlite")
    expected = [0.8, 0.8, 0.8, 0.8] if lost == "book" else [0.8, 0.8, 0.3, 0.3]
    assert paid(book, ledger, limit, "abcx") == expected


def test_a_kill_between_ledger_and_book_forgets_no_payment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(5.0)
    note = Ledger.charge

    def killed(self: Ledger, *arguments: Any) -> None:
        note(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "charge", killed)
    with pytest.raises(KeyboardInterrupt):
        released(book, ledger, gaussian(0.5), "a")
    monkeypatch.undo()
    assert len(ledger.entries()) == 1
    assert paid(RecordBook(tmp_path, KEY), Ledger(tmp_path), limit, "ab") == [0.5, 0.5]


def test_records_chosen_before_another_charge_are_not_released(tmp_path: Path) -> None:
    """The choice would be of payments that are no longer true. Whoever was charged decides nothing."""
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(1.0)
    payments = book.payments(ledger)
    released(book, ledger, gaussian(0.4), "xyz", limit)
    with pytest.raises(StateError, match="another release was charged"):
        book.charge(ledger, gaussian(0.4), limit, ids("a"), payments.version)
    assert len(ledger.entries()) == 1 and paid(book, ledger, limit, "a") == [0.0]


def test_no_charge_comes_between_the_totals_and_the_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A charge that the sets have and the totals lack would be taken off what each record has paid."""
    book, ledger, totals = RecordBook(tmp_path, KEY), Ledger(tmp_path), Ledger.totals
    released(book, ledger, gaussian(0.1), "ab")

    def while_another_process_charges(self: Ledger) -> Any:
        other = sqlite3.connect(book.folder / BOOK, timeout=0)
        with closing(other), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("UPDATE charged SET count = count + 1")
        return totals(self)

    monkeypatch.setattr(Ledger, "totals", while_another_process_charges)
    assert book.payments(ledger).version == 1


def test_a_refusal_follows_from_public_facts_and_leaves_nothing(tmp_path: Path) -> None:
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(1.0)
    released(book, ledger, gaussian(0.8), "ab", limit)
    # c has paid nothing; but a record that could exist would have paid 1.6
    with pytest.raises(PrivacyError, match="max_epsilon"):
        released(book, ledger, gaussian(0.8), "c", limit)
    assert paid(book, ledger, limit, "abc") == [0.8, 0.8, 0.0]


def test_a_set_that_cannot_be_stored_releases_nothing(tmp_path: Path) -> None:
    ledger, book = Ledger(tmp_path), RecordBook(tmp_path, KEY)
    book.lines_of(*(np.zeros((1, 16), dtype=np.uint8) + place for place in (1, 2)))
    (tmp_path / "records" / "sets").write_text("in the way")
    with pytest.raises(StateError):
        released(book, ledger, gaussian(0.5), "a")
    assert ledger.entries() == () and book.payments(ledger).version == 0


def test_nothing_of_a_set_stands_in_the_ledger_without_the_site_s_key(tmp_path: Path) -> None:
    names = []
    for key in (KEY, bytes([1]) * 32):
        ledger, book = Ledger(tmp_path / key.hex()[:2]), RecordBook(tmp_path / key.hex()[:2], key)
        released(book, ledger, gaussian(0.5), "ab")
        names.append(ledger.entries()[0].records)
    assert len(names[0]) == 64 and names[0] != names[1]


def test_a_record_at_a_known_place_goes_on_with_what_was_paid_there(tmp_path: Path) -> None:
    ledger, book, limit = Ledger(tmp_path), RecordBook(tmp_path, KEY), limit_in_zcdp(5.0)

    def known(*pairs: tuple[int, int]) -> Ids:
        rows = np.array([[value] * 16 for pair in pairs for value in pair], dtype=np.uint8)
        return book.lines_of(rows[0::2], rows[1::2])

    def loss(lines: Ids) -> list[float]:
        found, _ = book.payments(ledger).of(lines, limit, gaussian(1e-9))
        return [round(float(value) / order_of(limit.epsilon, DELTA), 9) for value in found[:, 0]]

    first = known((1, 101), (2, 102))
    book.charge(ledger, gaussian(0.5), None, first[:1])
    assert loss(known((1, 102), (2, 101))) == [0.5, 0.0], "files that changed places are known by content"
    assert loss(known((3, 102), (4, 101), (5, 105))) == [0.5, 0.0, 0.0], "the last one that lay there counts"
    assert loss(known((1, 106))) == [0.5], "a copy elsewhere is the same record"


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
    return [charges.sums(ordered(first), f"{first:016x}", 1 + (0 - first) % 10).entry for first in range(10)]


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
    ledger.charge(charges.sums(ordered(0), first.run, 2).entry, limit)


def test_a_run_s_token_is_no_proof_that_the_experiment_is_the_same(tmp_path: Path) -> None:
    """The server draws the token, so two experiments can have one."""
    same_token = [charges.sums(ordered(first), "0" * 16, 1 + first).entry for first in range(2)]
    assert (
        compose(same_token, DISJOINT_PARTS_DELTA).epsilon
        == compose([same_token[0]] * 2, DISJOINT_PARTS_DELTA).epsilon
    )


def test_lines_of_the_first_version_count_for_every_record(tmp_path: Path) -> None:
    """They name a task and no run, so nothing says what is disjoint."""

    def old(task: int) -> Entry:
        found = charges.sums(ordered(0), "0" * 16, task).entry
        return Entry.from_json(found.to_json() | {"part": f"task {task}"})

    assert (
        compose([old(1), old(2)], DISJOINT_PARTS_DELTA).epsilon
        == compose([old(1)] * 2, DISJOINT_PARTS_DELTA).epsilon
    )
