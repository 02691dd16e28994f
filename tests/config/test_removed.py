"""Keys that are gone: at their defaults they are dropped, otherwise refused with what replaces them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config import removed
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.removed import Removed
from perennial.config.site import load_site_config
from perennial.foundation.errors import ConfigError

EXPERIMENT: dict[str, Any] = {
    "name": "old",
    "data": {"source": "digits", "sites": 2},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp"},
    "strategy": {"name": "fedavg"},
}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three keys that no release ever had, beside those that are gone."""
    monkeypatch.setitem(removed.EXPERIMENT, "echo", Removed({"size": 3, "way": "up"}, "Leave it out."))
    monkeypatch.setitem(removed.EXPERIMENT, "data.echo", Removed(False, "Use data.sites."))
    monkeypatch.setitem(removed.STRATEGIES, ("fedavg", "echo"), Removed(1, "Use `strategy: scaffold`."))
    monkeypatch.setitem(removed.SITE, "policy.echo", Removed(None, "Write `policy.answers`."))


def with_keys(**changes: Any) -> dict[str, Any]:
    return {**EXPERIMENT, **changes}


def test_a_key_at_its_default_is_dropped_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    old = with_keys(
        echo={"size": 3}, data={**EXPERIMENT["data"], "echo": False}, strategy={"name": "fedavg", "echo": 1}
    )
    with caplog.at_level(logging.WARNING, "perennial.config"):
        read = Experiment.of(**old)
    assert read.digest == Experiment.of(**EXPERIMENT).digest
    assert "echo, data.echo, strategy.echo" in caplog.text
    assert old["data"]["echo"] is False, "the caller's mapping is left as it was"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"echo": {"size": 3, "way": "down"}}, "echo.way: found 'down'"),
        ({"data": {**EXPERIMENT["data"], "echo": True}}, "data.echo: found True"),
        ({"strategy": {"name": "fedavg", "echo": 2}}, "strategy.echo: found 2"),
    ],
)
def test_any_other_value_is_refused_and_the_replacement_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(with_keys(**changes)))
    with pytest.raises(ConfigError) as error:
        load_experiment(path)
    assert said in str(error.value) and str(path) in str(error.value)
    assert any(text in str(error.value) for text in ("Leave it out.", "Use data.sites.", "scaffold"))


def test_a_strategy_inside_another_one_is_looked_at_too() -> None:
    section = {"name": "contribution", "base": {"name": "fedavg", "echo": 1}}
    found = removed.drop_removed_from_experiment({"strategy": section})
    assert found == {"strategy": {"name": "contribution", "base": {"name": "fedavg"}}}


def test_the_same_holds_for_a_site(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: graz\nstate_dir: state\npolicy: {echo: null}\n")
    assert load_site_config(path).site == "graz"
    path.write_text("site: graz\nstate_dir: state\npolicy: {echo: 5}\n")
    with pytest.raises(ConfigError, match=r"policy\.echo: found 5.*policy\.answers"):
        load_site_config(path)
