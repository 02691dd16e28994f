"""What `perennial check` shows of data before a run, and how a run tells how far it is."""

from pathlib import Path

import pytest
import yaml

from perennial.cli.check import check_command
from perennial.cli.live import LiveDisplay
from perennial.config.experiment import load_experiment
from perennial.config.run import APP_ROOT
from perennial.data.config import DataConfig
from perennial.data.federation import build
from perennial.data.tasks_config import TasksConfig
from perennial.engine.expectation import expect
from perennial.foundation.errors import DataError

ROWS = "age,cp,sex,hospital,diagnosis\n" + "".join(
    f"{'' if i % 4 == 0 else 30 + i},{1 + i % 4},{'fm'[i % 2]},{'north' if i % 3 else 'south'},"
    f"{'ill' if i % 3 and i % 2 else 'well'}\n"
    for i in range(60)
)


def table(folder: Path, **changes: object) -> Path:
    (folder / "heart.csv").write_text(ROWS)
    data = {
        "source": "csv",
        "path": "heart.csv",
        "label_column": "diagnosis",
        "site_column": "hospital",
        "partition": {"kind": "natural"},
    }
    content = {"name": "heart", "data": data, "tasks": {"count": 1, "rounds": 2}, "model": {"name": "mlp"}}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def test_check_shows_samples_columns_and_what_may_surprise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(table(tmp_path), None)
    told = capsys.readouterr().out
    for words in (
        "60 samples",
        "site 'south' holds one class alone, 'well'",
        "columns cp hold at most 10 different whole numbers",
        "2 categories: f, m",
        "15 (25 %)",
        "learner: default; written out:",
        "name: adam",
        "expected here in one process: about",
    ):
        assert words in told, told


def test_an_expectation_counts_the_steps_that_a_run_takes(tmp_path: Path) -> None:
    experiment = load_experiment(table(tmp_path))
    expected = expect(experiment)
    assert expected is not None and expected.seconds > 0 and expected.memory > 10**7
    federation = build(experiment.data, experiment.tasks, 1)
    steps = sum(-(-len(site.train) // 32) * 2 * 2 for site in federation.sites.values())
    assert expected.steps == steps


def test_an_empty_class_folder_blames_no_key_that_nobody_set(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b", "empty"):
        (tmp_path / "images" / name).mkdir(parents=True)
    for index in range(6):
        Image.new("L", (8, 8), index).save(tmp_path / "images" / "ab"[index % 2] / f"{index}.png")
    config = DataConfig(source="folder", path=str(tmp_path / "images"), sites=1, test_fraction=0)
    with pytest.raises(
        DataError, match="no sample of 'empty'; add samples, or remove the empty class folder"
    ):
        build(config, TasksConfig(count=1, rounds=1), 1)


def test_progress_says_round_n_of_all_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = load_experiment(APP_ROOT / "experiments" / "quickstart.yaml")
    with LiveDisplay(experiment) as display:
        display.on_event({"event": "task_started", "classes": ["a"], "rounds": [2, 3]})
        for number in (1, 5):
            display.on_event(
                {
                    **{"event": "round", "task": 1, "round": number, "train_loss": 0.5, "accuracy": None},
                    **{"dropped": [], "refused": [], "skipped": False, "participants": ["a"], "seconds": 0.1},
                }
            )
    first, last = capsys.readouterr().out.strip().splitlines()
    assert "round 1 of 5" in first and "left" in first
    assert "round 5 of 5" in last and "left" not in last
