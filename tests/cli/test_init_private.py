"""What `perennial init --epsilon` writes: the advice of docs/private_sums.md, as files that check and run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import load_site_config
from perennial.engine.run import run_in_process
from perennial.privacy.accountants import make_accountant


def table(folder: Path) -> list[str]:
    generator = np.random.default_rng(0)
    rows = []
    for index in range(3000):
        ill = index % 2
        age, score = generator.normal(50 + 12 * ill, 8), generator.normal(0.3 * ill, 0.1)
        rows.append(f"{age:.1f},{score:.3f},{'mf'[index % 3 == 0]},{'ill' if ill else 'well'}")
    path = folder / "stroke.csv"
    path.write_text("\n".join(["age,score,sex,outcome", *rows]) + "\n")
    return [str(path)]


def images(folder: Path) -> list[str]:
    generator = np.random.default_rng(0)
    for index in range(120):
        kind = ("flat", "striped")[index % 2]
        pixels = generator.integers(60, 120, (40 + 4 * (index % 3), 60, 3))
        pixels[:, ::2] += 80 * (index % 2)
        place = folder / "skin" / kind
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index:03d}.png")
    return [str(folder / "skin")]


def arrays(folder: Path) -> list[str]:
    generator = np.random.default_rng(0)
    y = np.arange(2000) % 2
    np.savez(folder / "table.npz", x=(generator.normal(200 + 90 * y[:, None], 40, (2000, 3))), y=y)
    return [str(folder / "table.npz")]


def written(folder: Path, data: list[str], epsilon: str = "8") -> Path:
    output = folder / "first"
    done = CliRunner().invoke(app, ["init", *data, "--epsilon", epsilon, "--output", str(output)])
    assert done.exit_code == 0, done.output
    return output


@pytest.mark.parametrize(
    ("made", "least"), [(table, 0.85), pytest.param(images, 0.0, marks=pytest.mark.slow), (arrays, 0.85)]
)
def test_what_it_writes_passes_the_check_and_runs_one_task(
    made: Any, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path, made(tmp_path)) / "experiment.yaml"
    checked = CliRunner().invoke(app, ["check", str(path)])
    assert checked.exit_code == 0 and checked.output.rstrip().endswith("ok"), checked.output
    settings = RunSettings(str(path), runs=str(tmp_path / "runs"), device="cpu")
    summary: Any = run_in_process(settings)
    assert summary["final_accuracy"] > least
    # nothing that a record decides, and what the ledger charges is what was asked for
    experiment = load_experiment(path)
    assert experiment.data.validation_fraction == 0 and not experiment.evaluation.federated
    multiplier = experiment.privacy.noise_multiplier
    assert multiplier is not None
    assert 0.97 * 8 <= make_accountant("rdp", [(multiplier, 1.0, 1)]).epsilon(1e-5) <= 8


def test_the_site_s_policy_answers_noised_sums_and_nothing_else(tmp_path: Path) -> None:
    folder = written(tmp_path, table(tmp_path))
    policy = load_site_config(folder / "site.yaml").policy
    assert policy.answers == ["statistics"] and policy.require_privacy == "sample"
    call = ["check", str(folder / "site.yaml"), "--experiment", str(folder / "experiment.yaml")]
    said = CliRunner().invoke(app, call)
    assert said.exit_code == 0 and "would refuse" not in said.output, said.output
    assert not (folder / "experiment_trained.yaml").exists()


@pytest.mark.parametrize("epsilon", ["0", "-1", "nan"])
def test_an_epsilon_that_protects_nobody_or_is_none_is_refused(epsilon: str, tmp_path: Path) -> None:
    call = ["init", *table(tmp_path), "--epsilon", epsilon, "--output", str(tmp_path / "first")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code != 0 and not (tmp_path / "first").exists()


def test_images_in_a_scale_of_their_own_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "scans.npz", x=np.zeros((20, 32, 32), dtype=np.float32), y=np.arange(20) % 2)
    call = ["init", str(tmp_path / "scans.npz"), "--epsilon", "4", "--output", str(tmp_path / "first")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code != 0 and "not of 8 bits" in f"{done.output}{done.exception}"
