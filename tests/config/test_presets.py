"""A learner block is merged with its preset, the same wherever it is written."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial import load_experiment
from perennial.cli.main import app
from perennial.config.experiment import Experiment, override_settings
from perennial.config.learner import Optimizer
from perennial.config.run import APP_ROOT
from perennial.foundation.errors import ConfigError
from perennial.strategies.factory import build_strategy

CONTENT: dict[str, Any] = {
    "name": "merged",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
}
SETTINGS: list[tuple[str, list[Any]]] = [
    ("learner.preset", ["default", "replay", "none", None]),
    ("learner.epochs", [1, 3]),
    ("learner.batch_size", [8]),
    ("learner.optimizer", [{"lr": 0.02}, {"name": "sgd", "lr": 0.1}, {"weight_decay": 0.1}]),
    ("learner.optimizer.name", ["adam", "sgd"]),
    ("learner.optimizer.lr", [0.001, 0.05]),
    ("learner.optimizer.momentum", [0.5]),
    ("learner.classification", ["ce", "balanced_softmax", {"scale": 0.5}]),
    ("learner.classification.scale", [2.0]),
    ("learner.distillation", [None, {}, {"weight": 2.0}]),
    ("learner.distillation.temperature", [1.5]),
    ("learner.contrastive", [{}, {"weight": 0.5}]),
    ("learner.memory", [None, {"per_class": 3}, {"fixed_total": 100}, {"selection": "random", "share": 0.5}]),
    ("learner.memory.per_class", [5]),
    ("learner.memory.fixed_total", [90]),
    ("learner.memory.balanced", [False]),
    ("learner", [None, {"preset": "replay"}, {"memory": {"per_class": 7}}]),
    ("tasks.rounds", [2]),
]


def resolve(content: dict[str, Any], overrides: list[str], folder: Path) -> str:
    """The resolved experiment of a file with overrides, or the reason why there is none."""
    path = folder / "experiment.yaml"
    path.write_text(json.dumps(content))
    try:
        return load_experiment(str(path), overrides).model_dump_json()
    except ConfigError as error:
        return str(error).replace(str(path), "experiment merged")


def written(content: dict[str, Any], settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping that says the same as settings applied one after the other; written independently."""
    result = json.loads(json.dumps(content))
    for key, value in settings:
        node, parts = result, key.split(".")
        for part in parts[:-1]:
            there = node.get(part)
            node[part] = there if isinstance(there, dict) else {} if there is None else {"name": there}
            node = node[part]
        if parts[:2] == ["learner", "memory"] and parts[2:] in (["per_class"], ["fixed_total"]):
            node = result["learner"]["memory"]
            for budget in ("per_class", "fixed_total", "share"):
                node.pop(budget, None)
        rated = any(other == "learner.optimizer.lr" for other, _ in settings)
        if key == "learner.optimizer.name" and node.get("name") not in (None, value) and not rated:
            node.pop("lr", None)
        node[parts[-1]] = json.loads(json.dumps(value))
    return result


def test_file_set_and_mapping_resolve_alike(tmp_path: Path) -> None:
    """500 drawn overrides; a valid experiment and a refusal are the same in all three."""
    draw, resolved = random.Random(47), 0
    for number in range(500):
        chosen = draw.sample(SETTINGS, draw.randint(1, 4))
        settings = [(key, draw.choice(values)) for key, values in chosen]
        content = written(CONTENT, settings)
        by_set = resolve(CONTENT, [f"{key}={json.dumps(value)}" for key, value in settings], tmp_path)
        in_file = resolve(content, [], tmp_path)
        try:
            mapped = Experiment.of(**content)
            in_python = mapped.model_dump_json()
        except ConfigError as error:
            mapped, in_python = None, str(error)
        assert by_set == in_file == in_python, settings
        if mapped is not None:
            resolved += 1
            assert number % 5 or Experiment.of(**json.loads(in_python)) == mapped, settings
    assert resolved > 250


def test_a_resolved_experiment_means_what_it_meant(tmp_path: Path) -> None:
    """Whatever preset stands behind it: a run folder's experiment.yaml names every key of the learner."""
    stored = tmp_path / "experiment.yaml"
    paths = sorted((APP_ROOT / "experiments").glob("*.yaml"))
    assert len(paths) > 30
    for path in paths:
        found = load_experiment(path)
        stored.write_text(found.to_yaml())
        assert load_experiment(stored) == found, path


@pytest.mark.parametrize("setting", ["learner.memory.fixed_total=90", "learner.memory.per_class=5"])
def test_a_budget_set_on_a_resolved_learner_takes_the_place_of_its_own(tmp_path: Path, setting: str) -> None:
    path, resolved = tmp_path / "experiment.yaml", Experiment.of(**CONTENT)
    path.write_text(yaml.safe_dump(CONTENT))
    of_file = load_experiment(path, [setting])
    path.write_text(resolved.to_yaml())
    of_object = Experiment.of(**override_settings(resolved.model_dump(mode="json"), [setting]))
    assert of_file == load_experiment(path, [setting]) == of_object


@pytest.mark.parametrize("preset", ["default", "replay"])
def test_another_optimiser_does_not_take_the_rate_of_the_one_before(tmp_path: Path, preset: str) -> None:
    path, content = tmp_path / "experiment.yaml", CONTENT | {"learner": {"preset": preset}}
    for text in (yaml.safe_dump(content), Experiment.of(**content).to_yaml()):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"learner\.optimizer\.lr' is missing"):
            load_experiment(path, ["learner.optimizer.name=sgd"])
        settings = ["learner.optimizer.lr=0.1", "learner.optimizer.name=sgd"]
        for given in (settings, settings[::-1]):
            assert load_experiment(path, given).learner.optimizer == Optimizer(name="sgd", lr=0.1)
        assert load_experiment(path, ["learner.optimizer.name=adam"]).learner.optimizer.lr == 0.001


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=analytic"],
        ["learner.preset=replay"],
        ["learner.optimizer.name=adamw", "learner.optimizer.lr=0.001"],
        [
            "privacy={mode: sample, noise_multiplier: 1.0, clip_norm: 1.0, sample_rate: 0.1}",
            "evaluation.federated=false",
        ],
    ],
)
@pytest.mark.parametrize("strategy", ["fedavg", "analytic"])
def test_settings_of_a_resolved_experiment_mean_what_they_mean_of_its_file(
    tmp_path: Path, settings: list[str], strategy: str
) -> None:
    if strategy == "analytic":
        settings = ["strategy=fedavg", *settings]
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONTENT | {"strategy": strategy}))
    resolved, of_file = load_experiment(path), load_experiment(path, settings)
    path.write_text(resolved.to_yaml())
    of_object = Experiment.of(**override_settings(resolved.model_dump(mode="json"), settings))
    assert of_file == load_experiment(path, settings) == of_object


def test_a_learner_that_somebody_set_is_not_forgotten(tmp_path: Path) -> None:
    path, content = tmp_path / "experiment.yaml", CONTENT | {"learner": {"epochs": 7}}
    for text in (yaml.safe_dump(content), Experiment.of(**content).to_yaml()):
        path.write_text(text)
        with pytest.raises(ConfigError, match="nothing is trained under strategy analytic"):
            load_experiment(path, ["strategy=analytic"])
        assert load_experiment(path, ["seed=2"]).learner.epochs == 7


def test_check_takes_settings_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    app(["check", str(path), "--set", "learner.optimizer.lr=0.01"], standalone_mode=False)
    assert "learner: default with optimizer.lr 0.01; written out:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.clients=5", r"unknown key 'data\.clients' \(here: data\.sites\)"),
        ("clients=5", r"unknown key 'clients' \(here: data\.sites\)"),
        ("data.source=cifar10", "for this one, torchvision with dataset: cifar10"),
        ("privacy.epsilon=2", "here: privacy.noise_multiplier, from which epsilon follows"),
        ("learner.lr=0.1", r"unknown key 'learner\.lr' \(it belongs to learner\.optimizer\)"),
        ("tasks.rounds=0", r"tasks\.rounds: found 0; input should be greater than 0"),
        ("model=3", "model: found 3; allowed a block of keys"),
        ("model=smal_cnn", r"model\.name: found 'smal_cnn'.*\(did you mean 'small_cnn'\?\)"),
        ("strategy=fedproxx", r"strategy\.name: found 'fedproxx' \(did you mean 'fedprox'\?\)"),
    ],
)
def test_words_of_other_libraries_are_answered_with_ours(setting: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    with pytest.raises(ConfigError, match=words) as refused:
        found = load_experiment(path, [setting])
        build_strategy(found.strategy.name, found.strategy.parameters)
    assert str(refused.value).count("did you mean") <= 1 and "Config" not in str(refused.value)


def test_a_network_may_be_given_by_its_name() -> None:
    named = Experiment.of(**CONTENT | {"model": "mlp"})
    assert named == Experiment.of(**CONTENT | {"model": {"name": "mlp"}})


def test_a_preset_of_which_a_written_learner_leaves_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(Experiment.of(**CONTENT | {"learner": {"epochs": 7}}).to_yaml())
    with pytest.raises(ConfigError, match=r"learner\.preset: found replay with every key of a learner"):
        load_experiment(path, ["learner.preset=replay"])
    found = load_experiment(path, ["learner={preset: replay}"])
    assert found == Experiment.of(**CONTENT | {"learner": {"preset": "replay"}})
