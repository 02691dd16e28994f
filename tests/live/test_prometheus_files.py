"""The example of alert rules and the Grafana dashboard ask for metrics that there are."""

import json
import re
from pathlib import Path

import pytest
import yaml

from perennial.deploy.superlink import SuperLinkStatus
from perennial.live.hospital import format_site_metrics
from perennial.live.metrics import list_run_metrics, list_superlink_metrics, write_metrics
from perennial.live.run_state import RunState
from perennial.live.site_state import HospitalState
from perennial.live.web import list_allowed_hosts
from perennial.server.faults import Fault
from tests.live_pages import going_on

FOLDER = Path(__file__).resolve().parents[2] / "perennial" / "live" / "prometheus"


@pytest.fixture
def exported(tmp_path: Path) -> set[str]:
    """Every metric of operator and site, as Prometheus calls it."""
    with going_on(tmp_path) as run:
        run.begin_round(2, ["graz"])
        run.end_round(1, ["graz"], accuracy=0.5, refused=[{"site": "linz", "reason": "no"}])
        state = RunState(run.folder)
        state.read()
        superlink = list_superlink_metrics(
            SuperLinkStatus(silent_for=0.0, certificate_ends=1.0, sites={"graz": None})
        )
        runs = list_run_metrics([state], {"trial": {"graz": 1.0}})
        of_operator = write_metrics([Fault("superlink")], [*superlink, *runs]).decode()
    site = tmp_path / "site.yaml"
    site.write_text("site: graz\nstate_dir: state\npolicy: {max_epsilon: 8.0, require_privacy: sample}\n")
    hospital = HospitalState(site)
    hospital.read()
    return set(
        re.findall(r"^(perennial_\w+)", of_operator + format_site_metrics(hospital).decode(), re.MULTILINE)
    )


def asked_for(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(r"perennial_\w+", expression)}


def test_alert_rules_ask_for_metrics_that_there_are_and_say_what_to_do(exported: set[str]) -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert asked_for([rule["expr"] for rule in group["rules"]]) <= exported
    assert all(rule["annotations"]["remedy"] and rule["labels"]["severity"] for rule in group["rules"])


def test_the_dashboard_asks_for_metrics_that_there_are(exported: set[str]) -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    wanted = asked_for([target["expr"] for panel in panels for target in panel.get("targets", [])])
    assert wanted and wanted <= exported


def test_prometheus_is_let_in_under_the_name_that_its_network_knows() -> None:
    deploy = FOLDER.parents[1] / "deploy"
    compose = yaml.safe_load((deploy / "operator" / "compose.yaml").read_text().replace("@{", "{"))
    assert compose["services"]["pages"]["networks"] == ["pages"]
    words = compose["services"]["pages"]["entrypoint"]
    names = [words[place + 1] for place, word in enumerate(words) if word == "--name"]
    assert "pages" in list_allowed_hosts(words[words.index("--host") + 1], names)
