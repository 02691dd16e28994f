"""Sensitivity at a chosen specificity, the reader's prevalence, and the worst site beside a mean."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from perennial import load_run
from perennial.cli.main import app
from perennial.config.rounds import PointConfig
from perennial.foundation.errors import ConfigError, PerennialError
from perennial.learning.evaluation_tables import EvaluationTables
from perennial.learning.scored import Scored, bin_logits
from perennial.models.saved import load_saved
from perennial.server.measures.headline import choose_operating_points, compute_predictive_values
from perennial.server.measures.record import ClassMeasures, Measures, read_measures


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def tables(seed: int, rows: int = 4000) -> tuple[EvaluationTables, np.ndarray, np.ndarray]:
    """Tables of two classes whose log odds are normal around -1 and 1."""
    generator = np.random.default_rng(seed)
    label = generator.integers(2, size=rows)
    odds = generator.normal(2.0 * label - 1, 1.2)
    logits = torch.tensor(np.stack([np.zeros(rows), odds], axis=1))
    scored = Scored(*bin_logits(logits, torch.from_numpy(label)))
    found = scored.build_tables()
    found.calibration[...] = scored.scores()
    return found, label, odds


def test_the_threshold_keeps_the_specificity_on_the_samples_that_chose_it_and_is_judged_on_others() -> None:
    chosen, label, odds = tables(1)
    judged, other_label, other_odds = tables(2)
    judged.calibration[...] = chosen.calibration
    for asked in (0.8, 0.95, 0.99):
        point = choose_operating_points(judged, ["ill", "well"], {"well": PointConfig(specificity=asked)})[0]
        assert point.log_odds is not None and point.samples == (label == 0).sum()
        kept = (odds[label == 0] < point.log_odds).mean()
        assert asked <= kept < asked + 0.03, "the next edge of a bin, on the cautious side"
        assert point.sensitivity.value == pytest.approx(
            (other_odds[other_label == 1] >= point.log_odds).mean()
        )
        assert point.specificity.value == pytest.approx(
            (other_odds[other_label == 0] < point.log_odds).mean()
        )
    few, label, _ = tables(3, rows=30)
    assert (
        choose_operating_points(few, ["ill", "well"], {"well": PointConfig(specificity=0.99)})[0].log_odds
        is None
    )
    assert choose_operating_points(few, ["ill", "well"], {"later": PointConfig(sensitivity=0.9)}) == []


def test_the_threshold_keeps_the_sensitivity_on_the_samples_that_chose_it() -> None:
    judged, label, odds = tables(1)
    for asked in (0.8, 0.95, 0.99):
        point = choose_operating_points(judged, ["ill", "well"], {"well": PointConfig(sensitivity=asked)})[0]
        assert point.log_odds is not None and point.samples == (label == 1).sum()
        found = (odds[label == 1] >= point.log_odds).mean()
        assert asked <= found < asked + 0.03 and point.by == "sensitivity"


def test_what_an_answer_is_worth_at_the_reader_s_prevalence() -> None:
    """90 % sensitivity and specificity: of 100 called so where 1 % have it, 8.3 do."""
    measures = Measures(
        source="external",
        samples=2000,
        held_out=2000,
        classes=[ClassMeasures(name=name, samples=1000, called=1000) for name in ("ill", "well")],
        confusion=[[900, 100], [100, 900]],
    )
    positive, negative = compute_predictive_values(measures, "ill", 0.01)
    assert positive.value == pytest.approx(0.9 * 0.01 / (0.9 * 0.01 + 0.1 * 0.99))
    assert negative.value == pytest.approx(0.9 * 0.99 / (0.9 * 0.99 + 0.1 * 0.01))
    assert positive.low is not None and positive.high is not None and positive.value is not None
    assert positive.low < positive.value < positive.high
    # at the test set's own share it is the ordinary value
    assert compute_predictive_values(measures, "ill", 0.5)[0].value == pytest.approx(0.9)
    generator, held = np.random.default_rng(0), 0
    truth = 0.8 * 0.05 / (0.8 * 0.05 + 0.15 * 0.95)
    for _ in range(400):
        hits, false = generator.binomial(60, 0.8), generator.binomial(80, 0.15)
        drawn = measures.model_copy(
            update={"confusion": [[int(hits), int(60 - hits)], [int(false), int(80 - false)]]}
        )
        found = compute_predictive_values(drawn, "ill", 0.05)[0]
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert held >= 380


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("points")
    generator = np.random.default_rng(0)
    for name, count in (("train", 600), ("new", 200)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["size", "age", "diagnosis"])
            for index in range(count):
                ill = index % 4 == 0
                size = generator.normal(1.5 * ill, 1)
                out.writerow([f"{size:.4f}", f"{generator.normal(60, 9):.2f}", "ill" if ill else "well"])
    content = {
        "name": "points",
        "data": {
            **{"source": "csv", "path": str(folder / "train.csv"), "label_column": "diagnosis", "sites": 2},
            "calibration_fraction": 0.3,
        },
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 60}]},
        "strategy": "analytic",
        "evaluation": {"operating_points": {"ill": {"specificity": 0.9}}},
    }
    (folder / "points.yaml").write_text(yaml.safe_dump(content))
    invoke("run", folder / "points.yaml", "--runs", folder)
    return folder / "points"


def test_a_run_keeps_its_operating_point_for_predict_evaluate_and_export(run: Path) -> None:
    measures = read_measures(run)
    assert measures is not None
    point = measures.operating_points[0]
    assert point.name == "ill" and point.asked == 0.9 and point.log_odds is not None
    assert "ill at its operating point: sensitivity" in measures.headline[-1]
    assert "Operating points" in (run / "report.html").read_text()
    saved = load_saved(run / "model.safetensors")
    assert saved.confidence.points == {"ill": (0.9, point.log_odds)}
    new = run.parent / "new.csv"
    found = load_run(run).model.predict([new])
    probabilities = np.array([each.probabilities["ill"] for each in found])
    reached = np.array([each.reached["ill"] for each in found])
    assert np.array_equal(reached, np.log(probabilities / (1 - probabilities)) >= point.log_odds)
    rows = list(csv.DictReader(invoke("predict", run, new, "--format", "csv").splitlines()))
    assert [row["at operating point of ill"] == "yes" for row in rows] == reached.tolist()
    lines = [json.loads(line) for line in invoke("predict", run, new, "--format", "jsonl").splitlines()]
    assert [line["at_operating_point"]["ill"] for line in lines] == reached.tolist()
    assert ("ill: yes" in invoke("predict", run, new)) == bool(reached.any())
    told = " ".join(invoke("evaluate", run, new, "--prevalence", "ill=0.02").split())
    assert "Where 2 % of patients are ill: of those called so" in told
    (folder,) = (run / "evaluations").glob("new-*")
    judged = read_measures(folder)
    assert judged is not None
    with open(new) as rows:
        ill = np.array([row["diagnosis"] == "ill" for row in csv.DictReader(rows)])
    assert judged.operating_points[0].sensitivity.value == pytest.approx(reached[ill].mean())
    assert judged.operating_points[0].specificity.value == pytest.approx(1 - reached[~ill].mean())
    assert "Where 30 % of patients are ill" in invoke("report", run, "--prevalence", "ill=0.3")
    done = CliRunner().invoke(app, ["evaluate", str(run), str(new), "--prevalence", "il=0.02"])
    assert isinstance(done.exception, ConfigError) and "did you mean 'ill'" in str(done.exception)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operating_points": {"il": {"specificity": 0.9}}}, "'il' is no class"),
        ({"operating_points": {"ill": {"sensitivity": 1.0}}}, "less than 1"),
        ({"operating_points": {"ill": 0.9}}, "allowed one of {sensitivity: 0.95}"),
        (
            {"operating_points": {"ill": {"specificity": 0.9}}, "measures": False},
            "operating_points: sites hold",
        ),
    ],
)
def test_a_point_that_nobody_could_make_is_refused(
    run: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    content = yaml.safe_load((run.parent / "points.yaml").read_text())
    content["evaluation"] = changes
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "e.yaml")])
    assert isinstance(done.exception, PerennialError) and words in str(done.exception), done.exception
