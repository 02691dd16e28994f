"""The site.yaml that `perennial init` writes protects from the first day."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.site import SitePolicy, load_site_config
from perennial.deploy.bundle import TEMPLATES


def _table(folder: Path) -> Path:
    rows = [f"{40 + i},{i % 7},{'ill' if i % 3 else 'well'}" for i in range(60)]
    table = folder / "stroke.csv"
    table.write_text("\n".join(["age,score,outcome", *rows]) + "\n")
    return table


@pytest.fixture
def written(tmp_path: Path) -> Path:
    call = ["init", str(_table(tmp_path)), "--label", "outcome", "--output", str(tmp_path / "first")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    return tmp_path / "first" / "site.yaml"


def test_init_writes_the_policy_of_the_template(written: Path) -> None:
    found = load_site_config(written).policy
    assert found == SitePolicy.model_validate(
        yaml.safe_load((TEMPLATES / "site" / "site.yaml").read_text().replace("@{", "{"))["policy"]
    )
    assert found.require_privacy != "none" and found.max_epsilon is not None
    assert "statistics" not in found.answers and "evaluate" not in found.answers


def test_init_says_what_a_trial_on_one_machine_changes(written: Path) -> None:
    text = written.read_text()
    assert "For a trial" in text
    # the changes that the comment names, made
    policy = yaml.safe_load(text)["policy"]
    policy |= {"answers": ["train", "evaluate", "statistics"], "require_privacy": "none"}
    del policy["max_epsilon"]
    SitePolicy.model_validate(policy)
    for word in ("answers: [train, evaluate, statistics]", "require_privacy: none", "max_epsilon deleted"):
        assert word in text


def test_the_written_policy_refuses_what_sends_sums_in_the_clear(written: Path) -> None:
    call = ["check", str(written), "--experiment", str(written.with_name("experiment.yaml"))]
    done = CliRunner().invoke(app, call)
    assert "would refuse to answer 'statistics'" in done.output
    assert done.exit_code
