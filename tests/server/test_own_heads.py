"""A hospital's own head: kept there, chosen by its validation records, made again after a withdrawal."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from perennial import load_run
from perennial.cli.main import app
from perennial.learning.analytic.personal import FEDERATED, fit_personal_head
from perennial.learning.analytic.solve import LinearHead
from perennial.models.saved import PERSONAL_MODEL
from tests.data.test_first_hour import heart


def records(n: int, seed: int, turned: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(features (n, 4), labels of three classes, the last one rare). turned: how other the site is."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=draw, dtype=torch.float64)
    angle = torch.tensor([math.cos(turned), math.sin(turned), 0.0, 0.0], dtype=torch.float64)
    labels = (x @ angle + 0.5 * torch.randn(n, generator=draw, dtype=torch.float64) > 0).long()
    return x, torch.where(x[:, 3] > 1.8, 2, labels)


def federated() -> LinearHead:
    weight = torch.tensor([[-0.3, 0, 0, 0], [0.3, 0, 0, 0], [0, 0, 0, 0.3]], dtype=torch.float64)
    return LinearHead(weight, torch.tensor([0.5, 0.5, -0.2], dtype=torch.float64))


def share(head: LinearHead, of: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float((head.scores(of[0]).argmax(dim=1) == of[1]).double().mean())


def test_a_site_like_the_others_stays_near_them_and_another_one_keeps_its_own() -> None:
    few = fit_personal_head(federated(), records(25, 1, 0.0), records(60, 2, 0.0))
    assert share(few.personal, records(2000, 3, 0.0)) > share(few.own, records(2000, 3, 0.0))
    other = fit_personal_head(federated(), records(600, 1, 2.5), records(200, 2, 2.5))
    judged = records(2000, 3, 2.5)
    assert share(federated(), judged) < 0.4
    assert share(other.personal, judged) > share(other.own, judged) - 0.01 > 0.75
    assert other.penalty < FEDERATED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    heart(folder, rows=600)
    (folder / "e.yaml").write_text(
        "name: own\nseed: 1\ndata: {source: csv, path: heart.csv, label_column: diagnosis,"
        " site_column: hospital, partition: {kind: natural}, validation_fraction: 0.3}\n"
        "tasks: {count: 1, rounds: 1}\n"
        "model: {name: features, features: [inputs]}\nstrategy: {name: analytic, head: ridge}\n"
    )
    done = CliRunner().invoke(app, ["run", str(folder / "e.yaml"), "--runs", str(folder)])
    assert done.exit_code == 0, done.output
    return folder / "own"


def test_the_report_says_what_each_hospital_gains_and_the_export_holds_no_own_head(
    run: Path, tmp_path: Path
) -> None:
    found = json.loads((run / "summary.json").read_text())["own_heads"]
    assert sorted(found) == ["A", "B", "C"]
    page = (run / "report.html").read_text()
    assert "Each hospital on its own patients" in page and "personal, %" in page
    for site, each in found.items():
        assert (run / "sites" / site / PERSONAL_MODEL).exists()
        own = load_run(run).model_of(site)
        assert set(own.classes) == {"ill", "well"}
        assert sum(each["right"]["personal"]) >= max(map(sum, each["right"].values())) - 5
    CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.rglob(PERSONAL_MODEL))


def test_own_heads_are_made_again_after_a_withdrawal(run: Path) -> None:
    before = {site: (run / "sites" / site / PERSONAL_MODEL).read_bytes() for site in "AB"}
    rows = np.array([[50.0, 0, 220, 0, 1, 0, 0]], dtype=np.float32)
    CliRunner().invoke(app, ["withdraw", str(run), "--site", "C"], catch_exceptions=False)
    assert not (run / "sites" / "C" / PERSONAL_MODEL).exists()
    assert sorted(json.loads((run / "summary.json").read_text())["own_heads"]) == ["A", "B"]
    for site, bytes_before in before.items():
        assert (run / "sites" / site / PERSONAL_MODEL).read_bytes() != bytes_before
        assert len(load_run(run).model_of(site).probabilities(torch.from_numpy(rows))) == 1
