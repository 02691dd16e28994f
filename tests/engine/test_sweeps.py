"""Several seeds and settings: what is read before the first run, the table, and going on after a stop."""

import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from perennial import FedAvg
from perennial.cli.main import app
from perennial.config.run import APP_ROOT
from perennial.engine import sweeps
from perennial.engine.sweep_table import FONT, Sweep, mean_and_half
from perennial.engine.sweeps import parse_seeds, parse_sweep, plan_sweep, run_sweep
from perennial.foundation.errors import ConfigError, PerennialError, StateError
from perennial.server.report.comparison import Spread

QUICKSTART = APP_ROOT / "experiments" / "quickstart.yaml"
SMALL = {
    "name": "small",
    "data": {"source": "digits", "sites": 2, "partition": {"kind": "iid"}, "samples_limit": 200},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
}


@pytest.mark.parametrize(
    ("text", "found"), [("1:3", [1, 2, 3]), ("4", [4]), ("1,7:8", [1, 7, 8]), ([3, 1], [3, 1])]
)
def test_seeds(text: Any, found: list[int]) -> None:
    assert parse_seeds(text) == found


@pytest.mark.parametrize(
    "text", ["", "a", "1:", "3:1", "1,1", "1:5:2", "-1", "1:100000", 2, [1.5], ["a"], [-1], []]
)
def test_seeds_that_are_none_are_named(text: Any) -> None:
    with pytest.raises(ConfigError, match="--seeds: found"):
        parse_seeds(text)


def test_values_of_a_sweep_may_hold_commas_in_brackets() -> None:
    assert parse_sweep("strategy={name: fedprox, mu: 0.1},fedavg") == (
        "strategy",
        ["{name: fedprox, mu: 0.1}", "fedavg"],
    )
    assert parse_sweep("data.image_size=[8, 8],[16, 16]")[1] == ["[8, 8]", "[16, 16]"]
    nested = "{name: target, base: {name: fedavg, x: 1}}"
    assert parse_sweep(f"strategy={nested},fedavg")[1] == [nested, "fedavg"]
    for wrong in ("strategy", "strategy=", "strategy=a,,b", "=a", "strategy=a,a"):
        with pytest.raises(ConfigError, match="--sweep: found"):
            parse_sweep(wrong)


def test_every_setting_is_read_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.momentum: found 0\.9; strategy scaffold"):
        run_sweep(QUICKSTART, seeds="1:2", sweep=["strategy=fedavg,scaffold"], runs=tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'fedprox'"):
        run_sweep(SMALL, sweep={"strategy": ["fedavg", "fedprx"]}, runs=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("sweep", "named"),
    [
        ({"strategy": "fedavg"}, "sweep: strategy: found 'fedavg', allowed a list"),
        ({"strategy": []}, "sweep: strategy: found"),
        ({"strategy": [FedAvg]}, "sweep: strategy: .*values that a file can hold"),
        ({"seed": [1, 2]}, "--sweep: found seed; allowed: --seeds"),
        ("seed=1,2", "--sweep: found seed"),
    ],
)
def test_a_sweep_that_is_none_is_named(tmp_path: Path, sweep: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_sweep(SMALL, sweep=sweep, runs=tmp_path)


def test_what_single_runs_take_sweeps_take_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(sweeps, "_run_all", lambda path, found, *_: planned.extend(found))
    monkeypatch.setattr(sweeps, "_collect", lambda *_: None)
    run_sweep({key: value for key, value in SMALL.items() if key != "name"}, runs=tmp_path)
    run_sweep("quickstart", runs=tmp_path)
    run_sweep({**SMALL, "seed": 7}, runs=tmp_path)
    run_sweep(SMALL, overrides=["seed=8"], runs=tmp_path)
    assert [each.folder.name for each in planned] == [
        "experiment-s1",
        "quickstart-s1",
        "small-s7",
        "small-s8",
    ]
    with pytest.raises(ConfigError, match="--set: found seed with --seeds"):
        run_sweep(SMALL, seeds="1:2", overrides=["seed=8"], runs=tmp_path)


def test_a_folder_with_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    axes = {"learner.epochs": ["1", "2"]}
    planned = plan_sweep(QUICKSTART, [1], axes, [], "", tmp_path)
    assert [each.folder.name for each in planned] == ["quickstart-1-s1", "quickstart-2-s1"]
    folder = planned[0].folder
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    (folder / "experiment.yaml").write_text(planned[0].experiment.to_yaml())
    plan_sweep(QUICKSTART, [1], axes, [], "", tmp_path)
    (folder / "summary.json").write_text(json.dumps({"data_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="quickstart-1-s1: its run read other data"):
        plan_sweep(QUICKSTART, [1], axes, [], "", tmp_path)
    (folder / "experiment.yaml").write_text(planned[1].experiment.to_yaml())
    with pytest.raises(ConfigError, match="quickstart-1-s1: holds a run of other settings"):
        plan_sweep(QUICKSTART, [1], axes, [], "", tmp_path)
    plan_sweep(QUICKSTART, [1], axes, [], "", tmp_path, overwrite=True)


def test_the_interval_is_that_of_student() -> None:
    assert mean_and_half([]) == (None, None) and mean_and_half([3.0]) == (3.0, None)
    values = [80.0, 82.0, 85.0]
    mean, half = mean_and_half(values)
    assert mean == pytest.approx(82.3333, abs=1e-4)
    assert half == pytest.approx(4.302653 * statistics.stdev(values) / 3**0.5, rel=1e-5)


def test_the_table_as_text_csv_latex_and_png(tmp_path: Path) -> None:
    def summary(accuracy: float) -> dict[str, Any]:
        return {
            "final_accuracy": accuracy,
            "average_incremental_accuracy": 0.9,
            "forgetting": None,
            "unbalanced": False,
        }

    table = Sweep({"a_b=1": {1: summary(0.8), 2: summary(0.9)}, "fedavg": {1: summary(0.7)}}, tmp_path, ())
    lines = str(table).splitlines()
    assert (
        " ".join(lines[0].split()) == "setting seeds final accuracy average incremental accuracy forgetting"
    )
    assert "85.0 ± 63.5" in lines[2] and lines[2].endswith("-") and "70.0 " in lines[3]
    assert "a_b=1,final accuracy,2,85.0000,63.5310" in table.to_csv()
    assert r"a\_b=1 & 2 & 85.0 $\pm$ 63.5 & 90.0 $\pm$ 0.0 & - \\" in table.to_latex()
    pixels = np.asarray(Image.open(io.BytesIO(table.to_png())))
    inked = [*np.flatnonzero((pixels < 128).any(axis=1))]
    for middle in range(2 * FONT, 10 * FONT, 2 * FONT):
        assert middle in inked, "head, two rows and the note"
    assert inked[0] > FONT and inked[-1] < 9 * FONT
    assert not (pixels[:, [0, -1]] < 255).any(), "nothing is cut off"


def test_options_of_a_single_run_are_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["run", str(QUICKSTART), "--seeds", "1:2", "--seed", "3"])
    assert isinstance(found.exception, ConfigError) and "--seed: found with --seeds" in str(found.exception)


def test_a_sweep_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of one process, in this one: the test of real processes is slow."""
    made: list[str] = []

    class Here:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: Any) -> None: ...
        def submit(self, function: Any, *arguments: Any) -> Any:
            from concurrent.futures import Future

            future: Future[Any] = Future()
            made.append(Path(arguments[2]).name)
            try:
                future.set_result(function(*arguments))
            except PerennialError as error:
                future.set_exception(error)
            return future

    monkeypatch.setattr(sweeps, "ProcessPoolExecutor", Here)
    call: Any = {"sweep": {"strategy": ["fedavg", "uniform_mean"]}, "runs": tmp_path, "device": "cpu"}
    first = run_sweep(SMALL, seeds=[1], **call)
    assert made == ["small-fedavg-s1", "small-uniform_mean-s1"]
    both = run_sweep(SMALL, seeds=[1, 2], **call)
    assert made[2:] == ["small-fedavg-s2", "small-uniform_mean-s2"]
    assert both.rows["strategy=fedavg"][1] == first.rows["strategy=fedavg"][1]
    files = {path.name for path in both.folder.iterdir()}
    assert files == {"runs.json"} | {f"table.{ending}" for ending in ("txt", "csv", "tex", "png")}
    assert (first.folder.name, both.folder.name) == ("small-table", "small-table-2")
    (first.folder / "table.txt").unlink()
    again = run_sweep(SMALL, seeds=[1], **call)
    assert again.folder == first.folder and (first.folder / "table.txt").read_text() == f"{first}\n"
    assert (both.folder / "table.txt").read_text() == f"{both}\n" and len(made) == 4
    call = {"sweep": {"learner.optimizer.lr": ["0.1", "1e30"]}, "runs": tmp_path / "rates", "device": "cpu"}
    for _ in range(2):
        with pytest.raises(
            StateError,
            match=r"1 of 2 runs failed; .*small-table has the .*training diverged: .* lower learner",
        ):
            run_sweep(SMALL, seeds=[1], **call)
        lines = (tmp_path / "rates" / "small-table" / "table.csv").read_text().splitlines()
        assert re.fullmatch(r"learner.optimizer.lr=0.1,final accuracy,1,[0-9.]+,", lines[1])
        assert lines[4] == "learner.optimizer.lr=1e30,final accuracy,0,,"
    (tmp_path / "small-s1").mkdir()
    (tmp_path / "small-s1" / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="holds files that are no run's"):
        run_sweep(SMALL, seeds=[1], runs=tmp_path)
    assert (tmp_path / "small-s1" / "notes.txt").exists()


@pytest.mark.slow
def test_runs_in_processes_of_their_own_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    found = run_sweep(SMALL, seeds="1:2", runs=tmp_path, workers=2, device="cpu")
    again = run_sweep(SMALL, seeds="1:2", runs=tmp_path / "one", workers=1, device="cpu")
    hashes = [
        [json.loads((run / "summary.json").read_text())["model_sha256"] for run in one.runs]
        for one in (found, again)
    ]
    assert hashes[0] == hashes[1]


def test_a_row_of_which_a_seed_was_not_measured_has_no_mean(tmp_path: Path) -> None:
    """Neither in a sweep nor in `compare`: it would be the mean of fewer runs than its seeds say."""
    known = {"final_accuracy": 0.5, "average_incremental_accuracy": 0.5, "forgetting": None}
    sweep = Sweep({"a": {1: known, 2: known | {"final_accuracy": None}}}, tmp_path, ())
    ((_, seeds, figures),) = sweep.cells()
    assert seeds == 2 and figures == [(None, None), (50.0, pytest.approx(0.0)), (None, None)]
    assert Spread.of([0.5, None]) == Spread(None, None) == Spread.of([])
