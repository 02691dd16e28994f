"""Comparisons: means and deviations over seeds, paired differences, and what may not be compared."""

from pathlib import Path

import pytest

from perennial.foundation.errors import StateError
from perennial.server.report.comparison import compare
from tests.run_folders import write_run


def seeds(folder: Path, name: str, finals: dict[int, float], yaml: str = "name: x\n") -> list[Path]:
    return [
        write_run(
            folder / f"{name}-{seed}",
            events=[],
            yaml=f"{yaml}seed: {seed}\n",
            experiment=name,
            seed=seed,
            final_accuracy=final,
            average_accuracy=[0.9, 0.8, final],
        )
        for seed, final in finals.items()
    ]


def test_a_comparison_gives_means_sample_deviations_and_paired_differences(tmp_path: Path) -> None:
    ours = seeds(tmp_path, "ours", {1: 0.8, 2: 0.9, 3: 0.7})
    replay = seeds(tmp_path, "replay", {1: 0.7, 2: 0.9, 4: 0.1})
    once = seeds(tmp_path, "once", {9: 0.2})
    comparison = compare([*once, *replay, *ours])
    assert [row.experiment for row in comparison.rows] == ["ours", "replay", "once"]
    ours_row, _, once_row = comparison.rows
    # mean 0.8, squared deviations 0 + 0.01 + 0.01, divided by 2
    assert ours_row.spread("final accuracy").deviation == pytest.approx(0.1)
    assert str(ours_row.spread("final accuracy")) == "80.0 ± 10.0"
    assert str(once_row.spread("final accuracy")) == "20.0"
    final = [d for d in comparison.differences if d.measure == "final accuracy"]
    assert [(d.better, d.worse, d.wins, d.seeds) for d in final] == [("ours", "replay", 1, 2)]
    assert final[0].mean == pytest.approx(0.05)
    table, note, *_ = str(comparison).split("\n\n")
    assert "80.0 ± 10.0" in table and note == "± is the standard deviation over seeds."
    assert "±" not in str(compare(once))


def test_no_average_over_other_tasks_is_claimed(tmp_path: Path) -> None:
    orders = {"first": [["a"], ["b"], ["c"]], "turned": [["c"], ["a"], ["b"]], "one": [["a"], ["c", "b"]]}
    runs = {
        name: write_run(tmp_path / name, [], experiment=name, tasks=tasks) for name, tasks in orders.items()
    }
    again = write_run(tmp_path / "again", [], experiment="again")
    assert {d.measure for d in compare([runs["first"], again]).differences} > {"final accuracy"}
    for other in ("turned", "one"):
        assert {d.measure for d in compare([runs[other], again]).differences} == {"final accuracy"}


def test_classes_of_very_different_size_are_compared_by_balanced_accuracy_first(tmp_path: Path) -> None:
    many = write_run(tmp_path / "many", [], "seed: 1\n", experiment="many", balanced_accuracy=[0.9, 0.5, 0.4])
    fair = write_run(
        tmp_path / "fair",
        [],
        "seed: 1\n",
        experiment="fair",
        final_accuracy=0.6,
        balanced_accuracy=[0.9, 0.6, 0.5],
        unbalanced=True,
    )
    comparison = compare([many, fair])
    assert [row.experiment for row in comparison.rows] == ["fair", "many"]
    columns, cells = comparison.cells()
    assert columns[2:4] == ["final balanced accuracy", "final accuracy"]
    assert cells[0][2:4] == ["50.0", "60.0"]


def test_runs_of_one_name_with_other_settings_are_rows_of_their_own(tmp_path: Path) -> None:
    one = seeds(tmp_path / "one", "small", {1: 0.5, 2: 0.6}, "learner: {epochs: 1, memory: null}\n")
    two = seeds(tmp_path / "two", "small", {1: 0.8, 2: 0.7}, "learner: {epochs: 2, memory: null}\n")
    comparison = compare([*one, *two])
    assert [(row.experiment, sorted(row.runs)) for row in comparison.rows] == [
        ("small (learner.epochs=2)", [1, 2]),
        ("small (learner.epochs=1)", [1, 2]),
    ]


def test_runs_of_one_name_on_other_data_are_rows_of_their_own(tmp_path: Path) -> None:
    folders = [
        write_run(
            tmp_path / str(seed), [], f"seed: {seed}\ndata: {{path: /{seed}.csv}}\n", seed=seed, **found
        )
        for seed, found in enumerate(
            ({"data_sha256": "a" * 64}, {"data_sha256": "a" * 64}, {"data_sha256": "b" * 64}), start=1
        )
    ]
    other = write_run(tmp_path / "4", [], "seed: 4\n", seed=4, data_sha256="b" * 64, classes=["a", "d"])
    assert [sorted(row.runs) for row in compare(folders).rows] == [[1, 2], [3]]
    assert [row.experiment for row in compare([folders[2], other]).rows] == [
        "small (classes=a b c)",
        "small (classes=a d)",
    ]


def test_the_same_seed_twice_with_other_results_is_refused(tmp_path: Path) -> None:
    (first,) = seeds(tmp_path / "one", "small", {1: 0.5})
    (again,) = seeds(tmp_path / "two", "small", {1: 0.6})
    with pytest.raises(StateError, match=r"two.*seed 1 is also in .*one"):
        compare([first, again])


def test_nothing_is_claimed_of_runs_that_were_measured_on_other_samples(tmp_path: Path) -> None:
    def run(name: str, seed: int, measured_on: str | None, data: str, **more: object) -> Path:
        yaml = f"name: {name}\nseed: {seed}\ndata: {{{data}}}\n"
        return write_run(
            tmp_path / f"{name}-{seed}", [], yaml, experiment=name, seed=seed, measured_on=measured_on, **more
        )

    digits = run("digits", 1, "aa", "source: digits, sites: 5")
    ten_sites = run("ten", 1, "aa", "source: digits, sites: 10")
    skin = run("skin", 1, "bb", "source: pack")
    known = compare([digits, ten_sites, skin])
    assert {(d.better, d.worse) for d in known.differences} == {("digits", "ten")}
    assert {pair[:2] for pair in known.unlike} == {("digits", "skin"), ("ten", "skin")}
    assert "measured on different samples" in str(known)
    # without a record of the samples, the settings that say how data are read decide; a path does not
    old = run("old", 1, None, "source: csv, path: /a.csv, sites: 5")
    moved = run("moved", 1, None, "source: csv, path: /b.csv, sites: 9")
    other = run("other", 1, None, "source: csv, path: /a.csv, label_column: diagnosis")
    assert not compare([old, moved]).unlike
    assert [pair[2] for pair in compare([old, other]).unlike] == [
        "their data are read differently (data.label_column)"
    ]
    fewer = run("fewer", 1, "aa", "source: digits", classes=["a", "b"])
    assert [pair[2] for pair in compare([digits, fewer]).unlike] == ["their models know different classes"]
