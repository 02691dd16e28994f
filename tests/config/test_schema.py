"""The JSON schema of experiment.yaml and site.yaml, by which editors complete keys."""

import json

import pytest
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.experiment import Experiment
from perennial.config.site import SiteConfig


@pytest.mark.parametrize(("words", "model"), [(["schema"], Experiment), (["schema", "--site"], SiteConfig)])
def test_the_schema_names_every_key_with_its_own(words: list[str], model: type) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["properties"].keys() == model.model_fields.keys()
    assert found["additionalProperties"] is False
    definitions = found["$defs"]
    assert definitions["DataConfig"]["properties"]["source"]
