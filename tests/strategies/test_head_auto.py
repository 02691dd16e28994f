"""A head that chooses itself: among what, that every engine chooses alike, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from perennial.cli.init import init_command
from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.strategies import MOST_CANDIDATES
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.learning.analytic.solve import (
    Sums,
    estimate_oracle_shrinkage,
    estimate_within_class,
    solve_gaussian,
    solve_ridge,
)
from perennial.learning.analytic.statistics import Collector
from perennial.models.feature_maps.pixels import Inputs
from perennial.models.feature_maps.projection import round_to_grid
from perennial.strategies.analytic.automatic import KINDS, AutomaticHead

AUTO: dict[str, Any] = {
    "name": "auto",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "validation_fraction": 0.3},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "features", "features": ["inputs", {"name": "random", "width": 60}]},
    "strategy": {"name": "analytic", "head": "auto"},
}


def finished(folder: Path, workers: int = 1, **changes: Any) -> dict[str, Any]:
    (folder / "e.yaml").parent.mkdir(parents=True, exist_ok=True)
    (folder / "e.yaml").write_text(yaml.safe_dump(AUTO | changes))
    run_in_process(RunSettings(str(folder / "e.yaml"), runs=str(folder / "runs")), workers)
    return json.loads((folder / "runs" / "auto" / "summary.json").read_text())


def head(widths: tuple[int, ...]) -> AutomaticHead:
    names = tuple(map(str, widths))
    return AutomaticHead.of("auto", None, None, True).over(widths, names)


def sums(width: int = 9, samples: int = 60) -> Sums:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 3
    collector = Collector(width, range(3))
    collector.add(round_to_grid(torch.randn(samples, width, generator=generator) + labels[:, None]), labels)
    return Sums.of(collector.finish())


def test_a_candidate_is_the_head_of_its_maps_alone() -> None:
    found, whole = head((4, 5)), sums()
    assert len(found.candidates) == 3 * sum(map(len, KINDS.values()))
    kept = torch.tensor([4, 5, 6, 7, 8, 9])
    part = Sums(whole.gram[kept][:, kept], whole.sums[:, kept], whole.counts)
    for number, candidate in enumerate(found.candidates):
        if candidate.maps != (1,) or candidate.kind == "ridge, classes alike":
            continue
        solved = found.solved(whole, number)
        alone = (
            solve_gaussian
            if candidate.kind == "gaussian"
            else lambda s, v: solve_ridge(s, v, standardise=True)
        )
        assert not solved.weight[:, :4].any()
        assert torch.equal(solved.weight[:, 4:], alone(part, candidate.shrinkage).weight)


def test_workers_choose_alike_and_the_report_says_what_was_tried(tmp_path: Path) -> None:
    one = finished(tmp_path / "one")
    two = finished(tmp_path / "two", workers=2)
    assert one["model_sha256"] == two["model_sha256"] and one["head_choice"] == two["head_choice"]
    tried = one["head_choice"]
    assert len(tried) == 3 * len(KINDS)
    assert all(low <= each["value"] <= high for each in tried for low, high in [each["interval"]])
    page = (tmp_path / "one" / "runs" / "auto" / "report.html").read_text()
    assert "The head that was chosen" in page and "where intervals overlap another could be" in page


def test_masked_sums_choose_as_counts_in_the_clear_do(tmp_path: Path) -> None:
    clear = finished(tmp_path / "clear")
    masked = finished(tmp_path / "masked", secure={})
    assert masked["model_sha256"] == clear["model_sha256"]


@pytest.mark.parametrize("features", [None, "choice"])
def test_without_validation_samples_the_head_is_the_usual_one(tmp_path: Path, features: str | None) -> None:
    """So a small table gets a model, which says that nothing was compared; masked or not, it is the same."""
    maps: Any = ["inputs", {"name": "random", "width": 60}]
    if features:
        maps = [[{"name": "random", "width": 20}, {"name": "random", "width": 60}]]
    few = {
        "data": AUTO["data"] | {"samples_limit": 80, "validation_fraction": 0.001},
        "model": {"name": "features", "features": maps},
    }
    clear = finished(tmp_path / "clear", **few)
    assert "head_choice" not in clear and "map_choice" not in clear
    events = (tmp_path / "clear" / "runs" / "auto" / "events.jsonl").read_text()
    note = "no site has validation samples of these classes, so nothing was compared"
    assert events.count(note) == 2, "once a task"
    if not features:
        usual = AUTO["strategy"] | {"head": "gaussian", "shrinkage": 0.1}
        given = finished(tmp_path / "given", **few, strategy=usual)
        assert clear["model_sha256"] == given["model_sha256"]
        assert finished(tmp_path / "masked", **few, secure={})["model_sha256"] == clear["model_sha256"]


def test_what_cannot_choose_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="validation_fraction"):
        finished(tmp_path / "a", data=AUTO["data"] | {"validation_fraction": 0})
    with pytest.raises(ConfigError, match="head auto chooses them"):
        finished(tmp_path / "b", strategy=AUTO["strategy"] | {"shrinkage": 0.1})
    with pytest.raises(ConfigError, match="three maps or fewer"):
        head((1, 2, 3, 4))
    assert len(head((1, 2, 3)).candidates) <= MOST_CANDIDATES


def test_init_writes_it_and_check_says_what_it_costs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = [
        f"{40 + 9 * (i % 3) + generator.normal():.2f},{generator.normal():.2f},{'abc'[i % 3]}"
        for i in range(240)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,noise,diagnosis", *rows]) + "\n")
    init_command(tmp_path / "t.csv", tmp_path / "first", "")
    written = load_experiment(tmp_path / "first" / "experiment.yaml")
    assert written.strategy.parameters["head"] == "auto"
    done = CliRunner().invoke(app, ["check", str(tmp_path / "first" / "experiment.yaml")])
    assert done.exit_code == 0, done.output
    assert "head auto: one more message of at most" in done.output and "heads to compare" in done.output
    file = tmp_path / "first" / "experiment.yaml"
    run_in_process(RunSettings(str(file), runs=str(tmp_path / "runs")))
    summary = json.loads((tmp_path / "runs" / written.name / "summary.json").read_text())
    assert len(summary["head_choice"]) == 6, "two heads, shrunk by the sums, on inputs, pairs and both"


def _rows(product: bool, samples: int = 400) -> Sums:
    """Sums of a value, another, and their product, by which or by the first the two classes differ."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 2, generator=draw)
    wide = torch.cat([x, x[:, :1] * x[:, 1:], torch.zeros(samples, 1)], dim=1) / 8
    wide[:, 3] = (0.5 - wide[:, :3].square().sum(dim=1)).clamp(min=0).sqrt()
    labels = (wide[:, 2 if product else 0] + 0.01 * torch.randn(samples, generator=draw) > 0).long()
    collector = Collector(4, range(2))
    collector.add(round_to_grid(wide), labels)
    return Sums.of(collector.finish())


@pytest.mark.parametrize("product", [False, True])
def test_a_table_s_wider_map_is_taken_where_the_sums_speak_for_it(product: bool) -> None:
    """Its validation rows may see no difference, and may speak for it by chance."""
    settings = AutomaticHead.of("auto", None, None, True).over((2, 2), ("inputs", "more"), True)
    found = _rows(product)
    numbers, errors = settings._list_shrunk_by_sums(found)
    first = settings.choose_first(found)
    assert first in numbers and settings.candidates[first].maps == (0,) and len(numbers) == 6
    alike = {number: (0.7, 0.05) for number in numbers}
    chosen = settings._of_rows([(0.7, number) for number in numbers], alike, errors)[0][1]
    assert (settings.candidates[chosen].maps != (0,)) == product
    lucky = alike | {number: (0.9, 0.05) for number in numbers if settings.candidates[number].maps == (1,)}
    ranked = sorted(((value, number) for number, (value, _) in lucky.items()), reverse=True)
    if not product:
        assert settings._of_rows(ranked, lucky, errors)[0][1] == first


def test_the_gaussian_s_shrinkage_is_the_oracle_s(samples: int = 60) -> None:
    found = sums(9, samples)
    means, covariance, _ = estimate_within_class(found)
    deviation = covariance.diagonal().sqrt()
    r = (covariance / torch.outer(deviation, deviation)).numpy()
    p, n = len(r), samples - len(means)
    rho = ((1 - 2 / p) * np.trace(r @ r) + np.trace(r) ** 2) / (
        (n + 1 - 2 / p) * (np.trace(r @ r) - np.trace(r) ** 2 / p)
    )
    assert estimate_oracle_shrinkage(found) == pytest.approx(min(1.0, rho))
    assert estimate_oracle_shrinkage(sums(9, 6000)) < estimate_oracle_shrinkage(found)


def test_rows_whose_length_is_kept_differ_by_their_size_alone() -> None:
    rows = torch.tensor([[1.0, 2.0], [0.5, 1.0], [-9.0, 0.0]])
    found = Inputs((2,), keep_length=True)(rows)
    assert torch.allclose(found.norm(dim=1), torch.full((3,), 4 * 2**0.5))
    assert torch.equal(found[:2, :2], rows[:2]) and found[2, 0] == -4
