"""Some records of a site taken back out of a closed-form run, exactly, and not too few at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from perennial.cli.withdraw import _select_records
from perennial.cli.withdraw import withdraw as site_withdraw
from perennial.client.door import keep_split_key, read_withdrawal_form
from perennial.client.identity import Identity
from perennial.client.request_count import FILE, TABLES
from perennial.client.site import Site, open_site
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.data.config import DataConfig
from perennial.foundation.errors import ConfigError, DataError, PolicyRefusal, ProtocolError, StateError
from perennial.foundation.files import open_transaction
from perennial.learning.analytic.statistics import read_by_task, write_by_task
from perennial.models.saved import load_saved
from perennial.server.checkpoint import load_checkpoint
from perennial.server.opened_run import OpenedRun
from perennial.server.verification import verify
from perennial.server.withdrawal import withdraw, withdraw_records, write_form
from perennial.strategies.analytic.site import collect_sums
from perennial.strategies.analytic.withdrawn_records import of_patients, write_withdrawn_sums
from tests.server.test_withdrawal import DATA, TASKS, summary
from tests.strategies.test_analytic_runs import run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run(tmp_path, "whole", data=DATA, tasks=TASKS)
    away = [{"site": "site-2", "first_round": 1}]
    run(tmp_path, "without", data=DATA, tasks=TASKS, absence=away)
    return tmp_path / "runs"


def simulated(folder: Path, name: str, **policy: Any) -> Site:
    checkpoint, _ = load_checkpoint(folder / "checkpoint")
    experiment = Experiment.model_validate(checkpoint.experiment)
    answers = SitePolicy(answers=["statistics"], **policy)
    return open_site(Identity(name, experiment, answers, folder / "sites" / name, "cpu", 1))


def group(folder: Path, records: np.ndarray, name: str, site: str = "site-2") -> Path:
    np.savez(folder.parent / f"{name}.npz", x=records)
    output = folder.parent / f"{name}.safetensors"
    site_withdraw(folder, [folder.parent / f"{name}.npz"], site=site, output=output)
    return output


def test_withdrawn_records_were_never_there(runs: Path) -> None:
    """In two halves, which together are all that the site has; the sums in between are those of the rest."""
    site = simulated(runs / "whole", "site-2")
    rows = site.data.train
    halves = rows[::2], rows[1::2]
    # one that was made by mistake, and never sent, stands in nobody's way
    group(runs / "whole", site.data.x[rows[:9]].numpy(), "mistake")
    file = group(runs / "whole", site.data.x[halves[0]].numpy(), "half-0")
    first = withdraw_records(runs / "whole", "site-2", file)
    held, said = verify(first), summary(runs / "whole")
    assert said["sites"]["site-2"]["samples"] == len(halves[1])
    assert said["analytic"]["samples"] == sum(site["samples"] for site in said["sites"].values())
    assert said["analytic"]["withdrawn_in_part"] == ["site-2"]
    assert "records of site-2" in (runs / "whole" / "report.html").read_text()
    assert "8 signed sums of 4 sites" in held[0]
    for task in (1, 2):
        classes = site.process.registry.schedule.list_classes(task)
        there = site.data.find_task_indices("train", classes.start, classes.stop)
        rest = collect_sums(
            site, site.models.load_fixed_features(), classes, there[torch.isin(there, halves[1])]
        )
        kept = load_checkpoint(runs / "whole" / "checkpoint")[0].strategy["all-given"][str(task)]["site-2"]
        assert (kept["sha256"], kept["samples"]) == (rest.sha256, rest.samples)
    # what is given a second time is not subtracted a second time
    assert json.loads(withdraw_records(runs / "whole", "site-2", file).read_text()) == json.loads(
        first.read_text()
    )
    # the records of the first half are in the site's data still
    file = group(runs / "whole", site.data.x[halves[1]].numpy(), "half-1")
    verify(withdraw_records(runs / "whole", "site-2", file))
    verify(first)
    found, never = summary(runs / "whole"), summary(runs / "without")
    assert found["analytic"]["sums_sha256"] == never["analytic"]["sums_sha256"]
    a, b = (load_saved(runs / name / "model.safetensors").model.head for name in ("whole", "without"))
    assert a.weight.equal(b.weight) and a.bias.equal(b.bias)


def test_a_stopped_command_is_completed_and_the_site_can_still_go(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = simulated(runs / "whole", "site-2")
    file = group(runs / "whole", site.data.x[site.data.train[:40]].numpy(), "some")

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perennial.strategies.analytic.kept.KeptSums.keep_again", stop)
    with pytest.raises(KeyboardInterrupt):
        withdraw_records(runs / "whole", "site-2", file)
    monkeypatch.undo()
    verify(withdraw_records(runs / "whole", "site-2", file))
    certificate = withdraw(runs / "whole", "site-2")
    assert certificate is not None
    verify(certificate)
    assert (
        summary(runs / "whole")["analytic"]["sums_sha256"]
        == summary(runs / "without")["analytic"]["sums_sha256"]
    )


def test_sums_that_were_never_given_are_not_subtracted(runs: Path) -> None:
    before = summary(runs / "whole")["analytic"]["sums_sha256"]
    site = simulated(runs / "whole", "site-2")
    file = group(runs / "whole", site.data.x[site.data.train].numpy(), "all")
    with pytest.raises(StateError, match="site: found 'site-2', allowed 'site-1'"):
        withdraw_records(runs / "whole", "site-1", file)
    with pytest.raises(StateError, match="run: found"):
        withdraw_records(runs / "without", "site-2", file)
    by_task, facts = read_by_task(file)
    twice = {task: part + part for task, part in by_task.items()}
    write_by_task(file, twice, facts)
    with pytest.raises(ProtocolError, match="no samples have such sums"):
        withdraw_records(runs / "whole", "site-2", file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(StateError, match="missing or damaged"):
        withdraw_records(runs / "whole", "site-2", file)
    assert load_checkpoint(runs / "whole" / "checkpoint")[0].strategy["groups"] == {}
    certificate = withdraw(runs / "whole", "site-1")
    assert certificate is not None
    verify(certificate)
    assert summary(runs / "whole")["analytic"]["sums_sha256"] != before


def test_records_of_others_and_of_other_parts_are_refused(runs: Path) -> None:
    site = simulated(runs / "whole", "site-2")
    other = simulated(runs / "whole", "site-1")
    with pytest.raises(DataError, match="are not among this site's data"):
        group(runs / "whole", other.data.x[other.data.train[:3]].numpy(), "others")
    with pytest.raises(DataError, match="nothing to take back"):
        group(runs / "whole", site.data.x[site.data.test].numpy(), "held-out")
    with pytest.raises(ConfigError, match="give one of --run TOKEN"):
        site_withdraw(runs / "whole", site="site-2", output=runs / "x")


def test_the_floor_holds_for_what_goes_and_for_what_stays(runs: Path, tmp_path: Path) -> None:
    site = simulated(runs / "whole", "site-2", min_samples=5)
    token = load_checkpoint(runs / "whole" / "checkpoint")[0].progress.run
    largest = int(site.data.counts("train", 10).argmax())
    rows = site.data.find_task_indices("train", largest, largest + 1)
    with pytest.raises(PolicyRefusal, match="would lose fewer than 5 samples"):
        write_withdrawn_sums(site, token, rows[:4], tmp_path / "few.safetensors", {})
    with pytest.raises(PolicyRefusal, match="would keep fewer than 5 samples"):
        write_withdrawn_sums(site, token, rows[:-2], tmp_path / "most.safetensors", {})
    assert not list(tmp_path.glob("*.safetensors"))
    current = OpenedRun.open(runs / "whole").list_current_hashes("site-2")
    write_withdrawn_sums(site, token, rows, tmp_path / "class.safetensors", current)
    verify(withdraw_records(runs / "whole", "site-2", tmp_path / "class.safetensors"))


def test_the_floor_holds_over_several_files(runs: Path, tmp_path: Path) -> None:
    folder, output = runs / "whole", tmp_path / "records.safetensors"
    site = simulated(folder, "site-2", min_samples=5)
    token = load_checkpoint(folder / "checkpoint")[0].progress.run
    largest = int(site.data.counts("train", 10).argmax())
    rows = site.data.find_task_indices("train", largest, largest + 1)
    assert len(rows) == 18
    first = OpenedRun.open(folder).list_current_hashes("site-2")
    write_withdrawn_sums(site, token, rows[:5], output, first)
    withdraw_records(folder, "site-2", output)
    second = OpenedRun.open(folder).list_current_hashes("site-2")
    assert second != first
    # the second: one that says that the first file never came; the last: one of sums that nobody signed
    for current in (second, first, {}):
        with pytest.raises(PolicyRefusal, match="would lose fewer than 5 samples"):
            write_withdrawn_sums(site, token, rows[:6], output, current)
        with pytest.raises(PolicyRefusal, match="would keep fewer than 5 samples"):
            write_withdrawn_sums(site, token, rows[5:17], output, current)
    with pytest.raises(DataError, match="were taken back before"):
        write_withdrawn_sums(site, token, rows[:5], output, second)
    # a list that has the first ones still takes back the others alone
    (found,) = write_withdrawn_sums(site, token, rows[:10], output, second).values()
    assert found.samples == 5
    verify(withdraw_records(folder, "site-2", output))


def deployed(folder: Path, split_key: str) -> Site:
    """A site with data of its own, 60 images of 20 patients."""
    x = np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8)
    patients = np.array([f"p{k // 3}" for k in range(60)])
    np.savez(folder / "own.npz", x=x, y=np.arange(60) % 2, patient=patients)
    settings = {
        "name": "own",
        "data": {"source": "npz", "classes": ["0", "1"], "image_size": 4, "color": "gray"},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
        "strategy": {"name": "analytic", "head": "ridge"},
    }
    own = {"source": "npz", "path": str(folder / "own.npz"), "classes": ["0", "1"], "patient": "patient"}
    identity = Identity(
        "wien",
        Experiment.model_validate(settings),
        SitePolicy(answers=["statistics"]),
        folder / "state",
        "cpu",
        1,
        own_data=DataConfig.model_validate(own),
        deployed=True,
    )
    return open_site(identity, split_key=split_key)


def test_a_real_site_takes_patients_back_and_charges_it(tmp_path: Path) -> None:
    site = deployed(tmp_path, "a1" * 32)
    (tmp_path / "gone.txt").write_text("p3\n p7 \n")
    rows = of_patients(site, ["p3", "p7"])
    assert sorted(rows.tolist()) == [9, 10, 11, 21, 22, 23]
    with pytest.raises(DataError, match="not in this site's data: p99"):
        of_patients(site, ["p3", "p99"])
    all_training = [p for p in range(20) if set(range(3 * p, 3 * p + 3)) <= set(site.data.train.tolist())]
    gone = of_patients(site, [f"p{p}" for p in all_training[:4]])
    found = write_withdrawn_sums(site, "0" * 16, gone, tmp_path / "group.safetensors", {})
    assert found[1].samples == 12
    ledger = (tmp_path / "state").glob("ledger*")
    assert any(b"statistics" in file.read_bytes() for file in ledger if file.is_file())


def test_a_form_brings_the_key_that_the_site_does_not_keep(runs: Path, tmp_path: Path) -> None:
    form, state = write_form(runs / "whole", "site-2", tmp_path / "form.json"), tmp_path / "state"
    content = json.loads(form.read_text())
    with pytest.raises(StateError, match="in no task"):
        write_form(runs / "whole", "site-9", form)
    read = read_withdrawal_form(form)
    assert (read.run, read.split_key) == (content["run"], content["split_key"])
    assert read.current == {int(task): sha256 for task, sha256 in content["statements"].items()}
    with pytest.raises(StateError, match="nothing is kept of run"):
        read.check(state)
    keep_split_key(state / "runs" / content["run"], content["split_key"])
    with pytest.raises(StateError, match="nothing is kept of run"):
        read.check(state)
    with open_transaction(state / FILE, TABLES, "") as book:
        book.execute("INSERT INTO asked VALUES (?, ?, 'statistics', 'round 1')", (read.experiment, read.run))
    read.check(state)
    with pytest.raises(StateError, match="of experiment other"):
        replace(read, experiment="other").check(state)
    with pytest.raises(ProtocolError, match="split_key: found another one"):
        replace(read, split_key="other").check(state)
    form.write_text(yaml.safe_dump(["no form"]))
    with pytest.raises(ConfigError, match="no form of"):
        read_withdrawal_form(form)


def test_rows_of_a_table_are_found_as_the_site_reads_its_own(tmp_path: Path) -> None:
    """Decimal commas, a word for a missing value, and a number in its place that is not the mean."""
    rows = [f'"{k},5";{"unbekannt" if k % 4 == 0 else k};{k % 2}' for k in range(40)]
    (tmp_path / "own.csv").write_text("\n".join(["a;b;y", *rows]))
    (tmp_path / "gone.csv").write_text("\n".join(["a;b;y", *rows[4:8]]))
    shared = {
        **{"source": "csv", "classes": ["0", "1"], "label_column": "y"},
        **{"columns": {"a": "numeric", "b": "numeric"}, "imputation": {"a": 7, "b": 8}},
        "normalise": {"mean": {"a": 20, "b": 20}, "std": {"a": 10, "b": 10}},
    }
    settings = {
        "name": "own",
        "data": shared,
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
        "strategy": {"name": "analytic", "head": "ridge"},
    }
    own = shared | {"path": str(tmp_path / "own.csv"), "missing": ["unbekannt"], "decimal": ","}
    identity = Identity(
        "wien",
        Experiment.model_validate(settings),
        SitePolicy(answers=["statistics"]),
        tmp_path / "state",
        "cpu",
        1,
        own_data=DataConfig.model_validate(own),
        deployed=True,
    )
    site = open_site(identity, split_key="a1" * 32)
    assert _select_records(site, [tmp_path / "gone.csv"], None).tolist() == [4, 5, 6, 7]
