"""What methods ask of sites: said once, as data, which every reader takes from the same place."""

import sys
from pathlib import Path
from typing import Any

import pytest

from perennial.client.plan import Plan
from perennial.config.experiment import Experiment
from perennial.config.strategies import ASKS, STRATEGIES, Asks, Between, OneOf, find_asks
from perennial.data.schedule import Registry, TaskSchedule
from perennial.foundation import plugins
from perennial.foundation.errors import PolicyRefusal

CONTENT: dict[str, Any] = {
    "name": "asked",
    "data": {"source": "digits", "sites": 2, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
}


@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_strategy_reads_what_the_registry_says(name: str) -> None:
    strategy = plugins.load_ours(STRATEGIES[name])
    declared = strategy.asks.model_copy(update={"single_updates": "", "counts_alike": False})
    assert declared == ASKS[name].model_copy(update={"single_updates": "", "counts_alike": False})


@pytest.mark.parametrize(
    ("allowed", "value", "words"),
    [
        (OneOf(values=("feddyn",)), "scaffold", "found 'scaffold', in the approved experiment 'feddyn'"),
        (OneOf(values=(1, 2)), True, "found True, in the approved experiment 1, 2"),
        (Between(least=0.0, most=0.5), 0.51, "found 0.51, in the approved experiment 0 to 0.5"),
        (Between(least=0.0, most=0.5), "0.1", "found '0.1'"),
        (Between(least=0.0, most=1.0), float("nan"), "found nan"),
    ],
)
def test_a_setting_beyond_what_was_approved_is_named(allowed: Any, value: Any, words: str) -> None:
    asks = Asks(settings={"correction.alpha": allowed})
    with pytest.raises(PolicyRefusal, match=words) as refusal:
        asks.check_settings({"correction": {"alpha": value}})
    assert str(refusal.value).startswith("settings.correction.alpha: ")


def test_a_plug_in_never_counts_as_one_whose_sum_is_enough() -> None:
    assert find_asks("mine:Mean", {"asks": {"single_updates": ""}}).single_updates
    assert not find_asks("fedavg", {}).single_updates


def test_a_site_reads_what_a_plug_in_asks_from_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text(
        "from perennial import FedAvg\n"
        "from perennial.config.strategies import Asks\n"
        "class Curious(FedAvg):\n"
        "    asks = Asks(measurements=('train_accuracy',))\n"
    )
    content = {**CONTENT, "strategy": {"name": "layer_attention", "base": "curious:Curious"}}
    with plugins.use_also([tmp_path]):
        resolved = Experiment.model_validate(content).model_dump(mode="json")
    assert resolved["strategy"]["base"]["asks"] == {"measurements": ["train_accuracy"]}
    # a site reads this, and imports nothing for it
    del sys.modules["curious"]
    plan = Plan(Experiment.model_validate(resolved), Registry(("a", "b"), TaskSchedule((0, 1, 2), (1, 1))))
    assert plan.measurements == ("train_accuracy",)
    assert "curious" not in sys.modules
    with plugins.use_also([tmp_path]), pytest.raises(ValueError, match=r"strategy\.asks"):
        Experiment.model_validate({**content, "strategy": {"name": "curious:Curious", "asks": {}}})
