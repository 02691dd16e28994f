"""A form of the operator's asks for sums of records under an experiment that the site did not approve."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.client.identity import Identity
from perennial.client.site import open_site
from perennial.config.experiment import load_experiment
from perennial.learning.analytic.statistics import read_by_task
from perennial.protocol.messages import StatisticsRequest
from tests.approved import approve_installed
from tests.redteam.attacked_hospital import COLUMNS, RUN, SUMS, TABLE, Hospital, rows, write_table

KEY = "a1" * 32
CLEAR: dict[str, Any] = SUMS | {"privacy": None, "evaluation": None, "data": TABLE}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def test_records_are_taken_back_under_the_experiment_that_the_run_was_approved_with(tmp_path: Path) -> None:
    own = write_table(tmp_path / "data", table := rows(120))
    hospital = Hospital(tmp_path, {"answers": ["statistics"], "min_samples": 20}, own, **CLEAR)
    site = open_site(Identity.of_site(hospital.config, hospital.experiment), split_key=KEY)
    features = site.models.load_fixed_features().content
    stamp: dict[str, Any] = hospital.stamp() | {"split_key": KEY}
    assert hospital.ask(StatisticsRequest(**stamp, of_task=1, features=features)), hospital.refusal
    with (records := tmp_path / "gone.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*COLUMNS], *(row[:2] for row in table[:60])])
    form, out = tmp_path / "form.json", tmp_path / "out.safetensors"

    def withdraw(digest: str) -> str:
        content = {"run": RUN, "experiment": digest, "split_key": KEY, "statements": {}}
        form.write_text(json.dumps(content))
        call = ["site", "withdraw", str(hospital.site_file), str(records), "--form", str(form)]
        done = CliRunner().invoke(app, [*call, "--output", str(out)])
        assert (done.exit_code == 0) == out.exists()
        return str(done.exception or "")

    # the raw inputs of sixty records, in place of twelve random features
    other = tmp_path / "other.yaml"
    content = yaml.safe_load(hospital.file.read_text())
    other.write_text(
        yaml.safe_dump(content | {"model": {"name": "features", "features": [{"name": "inputs"}]}})
    )
    digest = load_experiment(other).digest
    assert "approved here: hostile" in withdraw(digest)
    approve_installed(other, hospital.config.approvals)
    assert f"of run '{RUN}' of experiment {digest:.12}" in withdraw(digest)
    assert withdraw(hospital.experiment.digest) == ""
    assert sum(part.samples for part in read_by_task(out)[0].values()) == 60
