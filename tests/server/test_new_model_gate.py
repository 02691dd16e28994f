"""The gate between a new model and patients: paired intervals, unseen records, verdicts."""

import csv
import math
import shutil
from math import lgamma
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import Result
from scipy.optimize import minimize_scalar
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.foundation.errors import ConfigError, DataError, StateError
from perennial.server.measures.record import Z
from perennial.server.new_model_gate import (
    VERDICTS,
    Kind,
    Part,
    compare,
    compute_paired_difference,
    estimate_records_needed,
    read_margins,
    write_verdicts,
)

NAMES = ("benign", "grey zone", "malignant")


def table(path: Path, rows: int, seed: int, wrong: str = "", at: str = "", sex: str = "") -> Path:
    """Three classes at two hospitals; of one, most rows of a hospital and sex are mislabelled."""
    generator = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["hospital", "sex", "size", "density", "age", "diagnosis"])
        for _ in range(rows):
            label, site, who = (
                generator.integers(3),
                generator.choice(["Aa", "Bb"]),
                generator.choice(["f", "m"]),
            )
            place = {"Aa": 0.0, "Bb": 4.0}[site] + {"f": 0.0, "m": 8.0}[who]
            values = generator.normal([3.0 * label, place, 60], [0.7, 0.5, 9])
            here = site in (at or site) and who in (sex or who) and generator.random() < 0.9
            name = NAMES[(label + 1) % 3] if NAMES[label] == wrong and here else NAMES[label]
            out.writerow([site, who, *(f"{value:.4f}" for value in values), name])
    return path


def train(folder: Path, name: str, data: Path, seed: int = 1) -> Path:
    content = {
        "name": name,
        "seed": seed,
        "data": {
            **{"source": "csv", "path": str(data), "label_column": "diagnosis", "site_column": "hospital"},
            **{"partition": {"kind": "natural"}, "test_fraction": 0.2, "column_kinds": {"sex": "ignore"}},
        },
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 200}]},
        "strategy": "analytic",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(app, ["run", str(folder / f"{name}.yaml"), "--runs", str(folder)])
    assert done.exit_code == 0, done.output
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    table(folder / "outside.csv", 900, seed=9)
    train(folder, "approved", table(folder / "first.csv", 500, seed=1))
    train(folder, "update", table(folder / "second.csv", 700, seed=2), seed=3)
    for name, at, sex in (("class", "", ""), ("site", "Bb", ""), ("sex", "", "m")):
        train(folder, name, table(folder / f"{name}.csv", 500, 4, "grey zone", at, sex))
    return folder


def gate(runs: Path, name: str, *more: object, data: str = "outside.csv") -> Result:
    arguments = ["evaluate", runs / name, runs / data, "--against", runs / "approved"]
    more = ("--set", "subgroup={column: sex, values: [f, m]}", *more)
    if "--margin" not in more:
        more = (*more, "--margin", 0.08)
    return CliRunner().invoke(app, [*map(str, (*arguments, *more))])


def test_a_harmless_update_passes_and_regressions_of_class_site_and_subgroup_do_not(runs: Path) -> None:
    done = gate(runs, "update")
    assert done.exit_code == 0, done.output
    assert "PASSED" in done.output and "margins in points: all parts 8" in done.output
    for name, part in (("class", "class grey zone"), ("site", "site Bb"), ("sex", "subgroup m")):
        done = gate(runs, name)
        assert done.exit_code == 1, done.output
        assert "REFUSED" in done.output and f"NOT shown to be as good: {part}" in done.output
    said = gate(runs, "site").output
    assert "as good: site Aa" in said and "NOT shown to be as good: site Aa" not in said


def test_the_card_has_every_verdict_and_keeps_what_somebody_wrote(runs: Path) -> None:
    gate(runs, "class", "--margin", 0.08)
    gate(runs, "class", "--margin", 0.09)
    (path,) = (runs / "class" / "evaluations").glob(f"outside-*/{VERDICTS}")
    verdicts = path.read_text().splitlines()
    assert len(verdicts) >= 2
    for command in (["evaluate"], ["card", str(runs / "class")]):
        if command[0] == "card":
            assert CliRunner().invoke(app, command).exit_code == 0
        assert (runs / "class" / "card.md").read_text().count("REFUSED: model") == len(verdicts)
    (runs / "class" / "card.md").write_text("# class: model card\n\n## Intended use\n\nIn our words.\n")
    gate(runs, "class")
    assert "In our words." in (runs / "class" / "card.md").read_text()
    path.write_text("no verdict\n")
    with pytest.raises(StateError, match=r"gate\.jsonl, line 1: damaged"):
        write_verdicts(runs / "class")
    path.write_text("\n".join(verdicts) + "\n")


def test_a_verdict_is_in_the_card_wherever_the_report_is(runs: Path) -> None:
    table(runs / "few.csv", 40, seed=5)
    done = gate(runs, "sex", "--output", runs / "elsewhere", data="few.csv")
    assert "REFUSED" in done.output and (runs / "elsewhere" / "report.html").exists()
    for _ in range(2):
        assert "on 40 records" in (runs / "sex" / "card.md").read_text()
        assert CliRunner().invoke(app, ["card", str(runs / "sex")]).exit_code == 0


def test_records_that_trained_or_chose_either_model_are_left_out_by_name(runs: Path) -> None:
    rows = (runs / "outside.csv").read_text().splitlines()
    for trained in ("first", "second"):
        own = (runs / f"{trained}.csv").read_text().splitlines()[1:]
        (runs / "mixed.csv").write_text("\n".join([*rows[:701], *own]) + "\n")
        done = gate(runs, "update", data="mixed.csv")
        share = (int(done.output.split(" records are left out")[0].split()[-1])) / len(own)
        assert 0.7 < share < 0.9, "the fifth that only judged the run chose nothing"
        assert "row 701" in done.output or "row 702" in done.output or "row 703" in done.output
    (runs / "mixed.csv").write_text("\n".join([rows[0], *own[:3]]) + "\n")
    # a run that holds nothing but such records
    only = CliRunner().invoke(app, ["evaluate", str(runs / "update"), str(runs / "mixed.csv")])
    assert isinstance(only.exception, DataError) or "records are left out" in only.output


def test_a_hospital_that_never_trained_needs_two_files_and_its_own_data(runs: Path) -> None:
    for name in ("approved", "class", "update"):
        (runs / "away" / name).mkdir(parents=True)
        shutil.copy(runs / name / "model.safetensors", runs / "away" / name)
    table(runs / "away" / "ours.csv", 900, seed=77)
    for name, status in (("update", 0), ("class", 1)):
        done = gate(runs / "away", name, data="ours.csv")
        assert done.exit_code == status, done.output
        assert "learnt from is not known here" in " ".join(done.output.split())
        verdict = f", {'REFUSED' if status else 'PASSED'}: model "
        assert verdict in (runs / "away" / name / "card.md").read_text()


def test_what_cannot_be_compared_is_refused_by_name(runs: Path) -> None:
    for margins, words in (
        (["0"], "allowed a share above 0"),
        (["x=0.1"], "'x' is no class, site or subgroup here"),
        (["malignant=0.1"], "how much worse may the new model be"),
    ):
        done = gate(runs, "update", *(part for each in margins for part in ("--margin", each)))
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    done = CliRunner().invoke(app, ["evaluate", str(runs / "update"), "x.csv", "--margin", "0.1"])
    assert isinstance(done.exception, ConfigError) and "belong together" in str(done.exception)


def test_the_interval_is_that_of_the_constrained_likelihood_and_holds_its_level() -> None:
    def by_maximum(lost: int, gained: int, units: int, difference: float) -> float:
        def loss(share: float) -> float:
            cells = (
                (lost, share),
                (gained, share + difference),
                (units - lost - gained, 1 - 2 * share - difference),
            )
            return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

        bounds = (max(0.0, -difference), (1 - difference) / 2)
        share = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        error = math.sqrt(units * (2 * share + difference - difference**2))
        return (gained - lost - units * difference) / error

    for lost, gained, units in ((0, 0, 45), (9, 1, 50), (1, 9, 50), (3, 2, 400)):
        found = compute_paired_difference(lost, gained, units)
        assert found.low is not None and found.high is not None
        assert by_maximum(lost, gained, units, found.low) == pytest.approx(Z, abs=1e-3)
        assert by_maximum(lost, gained, units, found.high) == pytest.approx(-Z, abs=1e-3)
    assert compute_paired_difference(0, 0, 45).low == pytest.approx(-Z * Z / (45 + Z * Z))
    # a model that is worse by the margin passes in 3.7 % at most, whatever else the two differ in
    for units, margin in ((20, 0.05), (36, 0.2)):
        cells = [(lost, gained) for lost in range(units + 1) for gained in range(units + 1 - lost)]
        passing = [each for each in cells if Part("class", "a", units, *each, margin).passes]
        for share in np.linspace(1e-9, (1 - margin) / 2 - 1e-9, 12):
            logs = np.log([share + margin, share, 1 - margin - 2 * share])
            counts = np.array([(lost, gained, units - lost - gained) for lost, gained in passing])
            ways = np.array(
                [lgamma(units + 1) - sum(lgamma(n + 1) for n in each) for each in counts.tolist()]
            )
            assert np.exp(ways + counts @ logs).sum() < 0.037


def test_what_a_margin_needs_and_how_sure_few_records_make_one() -> None:
    """Of two equally good models that differ on a tenth of records four in five pass at the usual number."""
    assert estimate_records_needed(0.05) == (73, 350) and estimate_records_needed(0.1) == (35, 104)
    draw, passed = np.random.default_rng(0), 0
    for _ in range(400):
        lost, gained, _alike = draw.multinomial(350, [0.05, 0.05, 0.9])
        passed += Part("class", "ill", 350, lost, gained, 0.05).passes
    assert 0.74 < passed / 400 < 0.88
    few, one, worse = (
        Part("class", "ill", 20, lost, gained, 0.1) for lost, gained in ((0, 0), (1, 1), (5, 0))
    )
    assert not few.passes and 0.9 < few.probability < 1 and worse.probability < 0.1
    assert worse.probability < one.probability < few.probability


def test_a_patient_counts_once_however_many_records_there_are() -> None:
    approved = np.array([True] * 12)
    new = np.array([False] * 4 + [True] * 8)
    groups: list[tuple[Kind, str, np.ndarray]] = [("class", "a", np.ones(12, dtype=bool))]
    margins = read_margins(["0.1"], ["a"])
    alone = compare((approved, new), groups, margins, None)[0]
    assert (alone.units, alone.lost, alone.gained) == (12, 4.0, 0.0)
    # eight records are of one patient, half of whose answers were lost
    patients = np.array([0] * 8 + [1, 2, 3, 4])
    grouped = compare((approved, new), groups, margins, patients)[0]
    assert (grouped.units, grouped.lost, grouped.gained) == (5, 0.5, 0.0)
