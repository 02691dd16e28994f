"""docs/deploy.md shows what `perennial site check` says of three policies that hospitals write."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from perennial.client.policy import describe_leaving
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.deploy.bundle import read_template_policy
from perennial.deploy.review import describe_asked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
BLOCKS = re.findall(r"```yaml\n(policy:.*?)```\n+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_shows_the_template_masked_sums_and_no_protection() -> None:
    policies = [SitePolicy.model_validate(yaml.safe_load(block)["policy"]) for block, _ in BLOCKS]
    template = SitePolicy.model_validate(yaml.safe_load(read_template_policy())["policy"])
    assert policies[0] == template
    assert [(policy.require_secure, policy.require_privacy) for policy in policies] == [
        (False, "sample"),
        (True, "none"),
        (False, "none"),
    ]


def test_the_experiment_of_the_page_ends_within_the_budget_of_the_template() -> None:
    (block,) = re.findall(r"\n\n(    name: skin\n(?:    .*\n)+)", PAGE.read_text())
    experiment = Experiment.model_validate(yaml.safe_load(textwrap.dedent(block)))
    policy = SitePolicy.model_validate(yaml.safe_load(read_template_policy())["policy"])
    assert "would refuse" not in "\n".join(describe_asked(experiment, policy, None))


@pytest.mark.parametrize(("block", "said"), BLOCKS)
def test_what_the_page_shows_is_what_site_check_says(block: str, said: str) -> None:
    policy = SitePolicy.model_validate(yaml.safe_load(block)["policy"])
    assert said.splitlines() == [*describe_leaving(policy)]
