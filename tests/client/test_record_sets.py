"""A hospital with a table of its own: which of its records are in a release, and who pays."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perennial.cli.privacy import ledger_command
from perennial.client.training_samples import (
    _identified,  # pyright: ignore[reportPrivateUsage]
    book_of,
    choose,
)
from perennial.config import charges
from perennial.foundation.record_key import record_key
from perennial.models.feature_maps.projection import RADIUS_SQUARED
from perennial.privacy.composition import compose
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.noised_sums import BLOCKS, STEPS, sensitivity
from perennial.privacy.record_book import RecordBook, record_figures
from perennial.protocol.messages import StatisticsReply, StatisticsRequest, TrainReply, TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic.site import collected
from tests.privacy.budgets import budget_for
from tests.privacy.test_record_book import DELTA, gaussian, ids
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
    features = place.site.models.fixed_features().content
    return place.ask(StatisticsRequest(**stamp, of_task=task, features=features))


def one_release() -> float:
    """The budget into which one release fits, and no second one of the same records."""
    from perennial.config import charges
    from perennial.config.experiment import Experiment

    content = {"name": "x"} | {key: value for key, value in EXPERIMENT.items() if value is not None}
    entry = charges.sums(Experiment.model_validate(content), "r", 1).entry
    return 1.1 * budget_for([entry], 1e-5).epsilon


def paid_by(folder: Path) -> list[int]:
    """How many releases each record has paid, of those that paid any; sorted."""
    place = Ledger(folder / "state")
    names = [entry.records for entry in place.entries()]
    sets = [(folder / "state" / "records" / "sets" / name).read_bytes() for name in names]
    members = [text[at : at + 16] for text in sets for at in range(0, len(text), 16)]
    return sorted(members.count(member) for member in {*members})


def test_every_release_names_its_records(tmp_path: Path) -> None:
    write_table(tmp_path, rows())
    place = hospital(tmp_path, one_release())
    for task in (1, 2):
        assert isinstance(ask(place, task), StatisticsReply), place.refusal
    assert paid_by(tmp_path) == [1] * 40
    # tasks of one run are disjoint, by public facts; the same records in another run are not
    assert ask(place, 1, run="1" * 16) is None and "policy.max_epsilon" in place.refusal
    assert paid_by(tmp_path) == [1] * 40


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
    second = ask(hospital(tmp_path, one_release()), 2)
    assert isinstance(second, StatisticsReply)
    assert set(second.statistics) == set(first.statistics)
    assert [second.statistics[name].shape for name in second.statistics] == [
        first.statistics[name].shape for name in first.statistics
    ]
    counts = paid_by(tmp_path)
    assert len(counts) == 40 and set(counts) == {1}, "who was in task 1 is in no other release"
    names = [entry.records for entry in Ledger(tmp_path / "state").entries()]
    sizes = [len((tmp_path / "state" / "records" / "sets" / name).read_bytes()) // 16 for name in names]
    assert sizes == [20, 20]


def test_that_all_records_are_spent_does_not_show(tmp_path: Path) -> None:
    table = [row for row in rows() if row[2] == "ill"]
    write_table(tmp_path, table)
    first = ask(hospital(tmp_path, one_release()), 1)
    write_table(tmp_path, [[*row[:2], "well"] for row in table])
    second = ask(hospital(tmp_path, one_release()), 2)
    assert isinstance(first, StatisticsReply) and isinstance(second, StatisticsReply)
    assert second.statistics["counts"].abs().sum() > 0, "there is noise where nobody is"
    assert paid_by(tmp_path) == [1] * 20


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
    classes = site.process.registry.schedule.classes_of(task)
    mechanism = charges.sums(site.experiment, "0" * 16, task)
    chosen = choose(site, mechanism, lambda: site.data.task_indices("train", classes.start, classes.stop))
    sums = collected(site, site.models.fixed_features(), classes, chosen.rows)
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
    assert 0 < moved(*found) <= sensitivity(12)


@pytest.mark.parametrize("name", ["visits.csv", "export of march.csv"])
def test_an_export_made_anew_gives_no_budget_back(tmp_path: Path, name: str) -> None:
    """Sorted otherwise, renamed, labelled anew and longer: who paid is in no further release."""
    table = [*rows(), *rows()[:5]]
    write_table(tmp_path, table)
    assert isinstance(ask(hospital(tmp_path, one_release()), 1), StatisticsReply)
    assert isinstance(ask(hospital(tmp_path, one_release()), 2), StatisticsReply)
    before = sum(paid_by(tmp_path))
    draw = np.random.default_rng(1)
    again = [[*row[:2], "well" if row[2] == "ill" else "ill"] for row in draw.permutation(table).tolist()]
    fresh = [[f"{draw.normal():.6f}", f"{draw.normal():.6f}", "well"] for _ in range(7)]
    write_table(tmp_path, [*again, *fresh])
    (tmp_path / "visits.csv").rename(tmp_path / name)
    policy = {"answers": ["statistics"], "require_privacy": "sample", "max_epsilon": 2.2 * one_release()}
    own = {"source": "csv", "path": str(tmp_path / name)}
    wider = Hospital(tmp_path, policy, own, **EXPERIMENT)
    spent_limit = Limit(one_release(), 1e-5, "sample")
    payments = book_of(wider.site.identity.state_dir).payments(wider.site.identity.ledger)
    entry = charges.sums(wider.site.experiment, "1" * 16, 1).entry
    lines, _ = _identified(wider.site, torch.arange(len(again) + len(fresh)))
    paid = ~payments.affordable(lines, spent_limit, entry)
    assert paid[: len(again)].all() and not paid[len(again) :].any()
    assert before == 40


def test_without_a_budget_everybody_is_in_and_the_ledger_says_what_it_cost(tmp_path: Path) -> None:
    write_table(tmp_path, rows())
    open_site = {"answers": ["statistics"]}
    own = {"source": "csv", "path": str(tmp_path / "visits.csv")}
    place = Hospital(tmp_path, open_site, own, **EXPERIMENT)
    for run in ("0" * 16, "1" * 16):
        assert isinstance(ask(place, 1, run), StatisticsReply), place.refusal
    ledger = Ledger(tmp_path / "state")
    assert paid_by(tmp_path) == [2] * 20
    assert ledger.cost(1e-5).epsilon == compose([*ledger.entries()], 1e-5).epsilon


def test_nothing_of_the_records_is_in_what_leaves_or_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path, rows())
    place = hospital(tmp_path, one_release())
    reply = ask(place, 1)
    key = (tmp_path / "state" / "records" / "key").read_bytes()
    line = json.loads((tmp_path / "state" / "ledger.jsonl").read_text().splitlines()[-1])
    name, ids = line["records"], book_of(place.site.identity.state_dir).every_line()
    told = repr(reply.to_record()).encode() + caplog.text.encode()
    for secret in (key, key.hex().encode(), name.encode(), *(i.hex().encode() for i in ids.tolist())):
        assert secret not in told


def test_each_step_of_training_is_charged_to_the_records_that_it_draws_from(tmp_path: Path) -> None:
    """Two rounds over the same records: one set, stored once, and two charges that name it."""
    training = {
        "model": {"name": "mlp", "hidden": [4], "norm": "none"},
        "tasks": {"count": 1, "rounds": 2},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "batch_size": 4},
        "strategy": "fedavg",
        "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.1},
    }
    write_table(tmp_path, [*rows(), rows()[0]])  # a copy shares the line of its content
    policy = {"answers": ["train"], "require_privacy": "sample", "max_epsilon": 8}
    own = {"source": "csv", "path": str(tmp_path / "visits.csv")}
    place = Hospital(tmp_path, policy, own, **EXPERIMENT | training)
    for number in (1, 2):
        stamp: dict[str, Any] = place.stamp(number) | {"split_key": SPLIT_KEY}
        reply = place.ask(TrainRequest(**stamp, arrays=Tensors(place.arrays())))
        assert isinstance(reply, TrainReply), place.refusal
    first, second = Ledger(tmp_path / "state").entries()
    assert first.records == second.records != ""
    stored = list((tmp_path / "state" / "records" / "sets").iterdir())
    assert [path.stat().st_size for path in stored] == [40 * 16], "one line for a content"
    figures = record_figures(tmp_path / "state", 1e-5)
    assert figures is not None and figures.records == 40
    assert figures.dearest.epsilon == compose([first, second], 1e-5).epsilon


def site(folder: Path) -> None:
    """a, b and c: 0.6, 0.5 and 0.1 of loss; x has 0.1."""
    ledger, book = Ledger(folder), RecordBook(folder, record_key(folder))
    for cost, names in ((0.1, "abcx"), (0.4, "ab"), (0.1, "a")):
        book.charge(ledger, gaussian(cost), None, ids(names))


def test_dearest_median_and_spent(tmp_path: Path) -> None:
    assert record_figures(tmp_path, DELTA) is None
    site(tmp_path)
    limit = budget_for([gaussian(0.65)], DELTA)
    found = record_figures(tmp_path, DELTA, limit)
    assert found is not None and (found.records, found.spent) == (4, 1)
    dearest = compose([gaussian(0.1), gaussian(0.4), gaussian(0.1)], DELTA)
    assert found.dearest.epsilon == pytest.approx(dearest.epsilon)
    assert found.median.epsilon == pytest.approx(compose([gaussian(0.1), gaussian(0.4)], DELTA).epsilon)


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site(tmp_path)
    limit = budget_for([gaussian(0.65)], DELTA)
    ledger_command(tmp_path, DELTA, limit.epsilon)
    said = " ".join(capsys.readouterr().out.split())
    assert "4 records were in releases; 1 have spent their budget; epsilon of the dearest" in said
