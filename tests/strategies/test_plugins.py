"""Doors: other people's strategies, losses, models and sources by name, checked, and part of the identity."""

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.flower_simulation import FlowerSimulation
from perennial import load_run, run
from perennial.config.approval import find_approved_experiment
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import SiteConfig
from perennial.deploy.application import approve, read_offer, stage_application
from perennial.engine.run import run_in_process
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, PerennialError, PolicyRefusal
from perennial.server.summary import extract_hashes
from perennial.strategies.factory import build_strategy
from tests.plugin_package import CODE, EXPERIMENT, MODULE, install


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = install(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(folder))
    with plugins.use_also([MODULE]):
        yield folder
    sys.modules.pop(MODULE, None)


def written(folder: Path, name: str = "experiment", **changes: Any) -> Path:
    content = {**deepcopy(EXPERIMENT), **changes}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_methods_by_name_learn_in_process_and_with_workers(installed: Path, tmp_path: Path) -> None:
    path = written(tmp_path)
    alone: Any = run_in_process(RunSettings(str(path), runs=str(tmp_path / "alone"), device="cpu"))
    assert alone["final_accuracy"] > 0.5, "four classes; chance is 0.25"
    spread = run_in_process(RunSettings(str(path), runs=str(tmp_path / "two"), device="cpu"), workers=2)
    assert extract_hashes(spread) == extract_hashes(alone)


def test_names_become_targets_that_need_no_entry_points(installed: Path, tmp_path: Path) -> None:
    experiment = load_experiment(written(tmp_path))
    assert experiment.strategy.name == f"{MODULE}:Median"
    assert experiment.data.source == f"{MODULE}:blobs"
    assert experiment.model.name == f"{MODULE}:Wide"
    assert experiment.learner.classification.name == f"{MODULE}:Focal"
    direct = written(tmp_path, "direct", strategy={"name": f"{MODULE}:Median", "step": 0.9})
    assert load_experiment(direct).digest == experiment.digest
    assert Experiment.model_validate(yaml.safe_load(experiment.to_yaml())) == experiment


def test_a_plug_in_inside_one_of_ours(installed: Path, tmp_path: Path) -> None:
    section = {
        "name": "clustered_personalisation",
        "global_rounds": 1,
        "base": {"name": "stepped_median", "step": 0.5},
    }
    experiment = load_experiment(written(tmp_path, strategy=section))
    assert experiment.strategy.parameters["base"]["name"] == f"{MODULE}:Median"
    assert experiment.plugins.keys() == {f"{MODULE}:{name}" for name in ("Median", "Focal", "Wide", "blobs")}
    strategy = build_strategy(
        "clustered_personalisation", experiment.strategy.parameters | {"base": "stepped_median"}
    )
    assert type(strategy.base).__name__ == "Median"  # type: ignore[attr-defined]  # pyright: ignore


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"strategy": {"name": "stepped_median", "stepp": 1}},
            "strategy: unknown key 'stepp' .did you mean 'step'",
        ),
        ({"strategy": {"name": "stepped_median", "step": "far"}}, "strategy.step: found 'far'"),
        ({"strategy": {"name": "stepped_median", "step": -1}}, "step: found -1"),
        ({"strategy": {"name": "steped_median"}}, "found 'steped_median' .did you mean 'stepped_median'"),
        ({"strategy": {"name": "no_such:Thing"}}, "'no_such:Thing', which is code of somebody else"),
        ({"strategy": {"name": f"{MODULE}:Mediam"}}, f"Mediam' .did you mean '{MODULE}:Median'"),
        ({"strategy": {"name": f"{MODULE}:Wide"}}, f"{MODULE} offers as a strategy: stepped_median"),
        ({"model": {"name": "wide", "options": {"feature": 3}}}, "model.options: unknown key 'feature'"),
        ({"model": {"name": f"{MODULE}:Focal"}}, "model"),
        ({"model": {"name": "mlp", "options": {"features": 3}}}, "options"),
        ({"data": {"source": "blobs", "sites": 3, "options": {"spred": 1}}}, "data.options: unknown key"),
        ({"data": {"source": "blob", "sites": 3}}, "did you mean 'blobs'"),
        ({"data": {"source": "digits", "sites": 3, "options": {"a": 1}}}, "options belongs to source"),
    ],
)
def test_keys_are_checked_as_ours_are(
    installed: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PerennialError, match=words):
        run_in_process(RunSettings(str(written(tmp_path, **changes)), runs=str(tmp_path), device="cpu"))


def test_other_code_is_another_experiment(installed: Path, tmp_path: Path) -> None:
    before = load_experiment(written(tmp_path))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(before.to_yaml())
    assert load_experiment(resolved).digest == before.digest
    (installed / MODULE / "__init__.py").write_text(CODE + "\n# another version\n")
    assert load_experiment(written(tmp_path)).digest != before.digest
    with pytest.raises(ConfigError, match="was written with"):
        load_experiment(resolved)


def test_an_app_holds_no_code_and_a_site_names_its_plug_ins(installed: Path, tmp_path: Path) -> None:
    app = stage_application(written(tmp_path), [], "plugged", tmp_path / "apps")
    assert not [*app.folder.rglob("*.py")]
    config = SiteConfig(site="graz", state_dir=tmp_path)
    with pytest.raises(ConfigError, match="write `plugins: {median_plugin: SHA256}` in site.yaml"):
        read_offer(app.fab, config)
    digest = plugins.compute_fingerprint(f"{MODULE}:Median")
    named = config.model_copy(update={"plugins": {MODULE: digest}})
    offer = read_offer(app.fab, named)
    assert offer.experiment is not None and f"{MODULE}:Median" in offer.document
    approval = approve(offer, tmp_path / "flower", tmp_path / "approvals")
    settings = RunSettings(digest=offer.experiment.digest)
    known = find_approved_experiment(settings, tmp_path / "approvals", named.plugins)
    assert approval.title == known.name and known == offer.experiment
    with pytest.raises(PolicyRefusal, match="cannot run it: .*does not name"):
        find_approved_experiment(settings, tmp_path / "approvals", {})
    (installed / MODULE / "__init__.py").write_text(CODE + "\n# another version\n")
    with pytest.raises(ConfigError, match=r"the installed package 'median_plugin' has SHA-256"):
        read_offer(app.fab, named)


def test_a_package_that_nobody_named_changes_nothing(installed: Path, tmp_path: Path) -> None:
    facts = installed / "second-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    points = "[perennial.strategies]\nstepped_median = second:Median\nother = second:Other\n"
    (facts / "entry_points.txt").write_text(points)
    assert load_experiment(written(tmp_path)).strategy.name == f"{MODULE}:Median"
    with pytest.raises(ConfigError, match="pass --plugins second;"):
        load_experiment(written(tmp_path, strategy={"name": "other"}))
    # nor may it say what a package that is in use offers
    (facts / "entry_points.txt").write_text(points.replace("second:Median", f"{MODULE}:Middle"))
    with pytest.raises(ConfigError, match="several plug-ins have it"):
        load_experiment(written(tmp_path))


def test_a_folder_offers_what_its_modules_define(tmp_path: Path) -> None:
    folder = tmp_path / "methods"
    (folder / "perennial").mkdir(parents=True)
    (folder / "perennial" / "__init__.py").write_text("raise SystemExit('read as Perennial')\n")
    (folder / "json.py").write_text("class Median: ...\n")
    (folder / "this.py").write_text("class Median: ...\n")
    sys.modules.pop("this", None)
    (folder / "mine_of_folder.py").write_text(f"from subprocess import getoutput\nimport os\n{CODE}")
    path = written(tmp_path, data={"source": "mine_of_folder:blobs", "sites": 3})
    content = yaml.safe_load(path.read_text())
    names = {"source": "blobs", "model": "Wide", "classification": "Focal", "strategy": "Median"}
    content["model"]["name"] = f"mine_of_folder:{names['model']}"
    content["learner"]["classification"]["name"] = f"mine_of_folder:{names['classification']}"
    for name, words in (
        ("mine_of_folder:Median", None),
        ("mine_of_folder:getoutput", "defines no 'getoutput'"),
        ("mine_of_folder:os", "defines no 'os'"),
        ("mine_of_folder:blobs", "is no strategy"),
        ("json:Median", "has the name of a module that is there already"),
        ("this:Median", "has the name of a module that is there already"),
        ("perennial:Median", "nobody named it"),
        ("perennial.strategies.fedavg:FedAvg", "nobody named it"),
        ("subprocess:Popen", "nobody named it"),
    ):
        path.write_text(yaml.safe_dump({**content, "strategy": {"name": name}}))
        settings = RunSettings(str(path), name=name.replace(":", "-"), runs=str(tmp_path), device="cpu")
        with plugins.use_also([folder]):
            if words is None:
                assert load_experiment(path).strategy.name == name
            else:
                with pytest.raises(PerennialError, match=words):
                    run_in_process(settings)
    assert str(folder) not in sys.path and "this" not in sys.modules


def test_a_stored_run_opens_without_its_plug_ins_and_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "kept_methods.py").write_text(CODE)
    path = written(tmp_path, strategy={"name": "kept_methods:Median"}, model={"name": "mlp", "hidden": [4]})
    text = path.read_text().replace("source: blobs", "source: digits").replace("name: focal", "name: ce")
    content = yaml.safe_load(text)
    del content["data"]["options"], content["learner"]["classification"]["options"]
    content["model"] = {"name": "kept_methods:Wide"}
    path.write_text(yaml.safe_dump(content))
    run_folder = run(path, runs=tmp_path / "runs", device="cpu", plugins=[folder]).folder
    opened = load_run(run_folder)
    assert opened.experiment.strategy.name == "kept_methods:Median"
    assert set(opened.experiment.plugins) == {"kept_methods:Median", "kept_methods:Wide"}
    with pytest.raises(PerennialError, match="pass --plugins FOLDER"):
        _ = opened.model
    with plugins.use_also([folder]):
        assert load_run(run_folder).model.classes
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(PerennialError, match="pass --plugins FOLDER"):
        _ = load_run(run_folder).model


def test_nothing_is_in_use_where_nobody_named_anything(installed: Path) -> None:
    with plugins.restore_in_use(plugins.InUse()):
        assert plugins.find_in_use().packages == {}
        with (
            pytest.raises(ConfigError, match="which is no installed package with plug-ins"),
            plugins.use_also(["subprocess"]),
        ):
            raise AssertionError
    with plugins.use_only({}), pytest.raises(ConfigError, match="only site.yaml"), plugins.use_also([MODULE]):
        raise AssertionError


@pytest.mark.slow
def test_methods_by_name_under_flwr_run(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = written(tmp_path)
    here = run_in_process(RunSettings(str(path), runs=str(tmp_path / "here"), device="cpu"))
    with FlowerSimulation(tmp_path / "simulation") as simulation:
        run = simulation.run(3, {"experiment": str(path), "runs": str(tmp_path / "there"), "plugins": MODULE})
        summary = tmp_path / "there" / "plugged" / "summary.json"
        assert summary.exists(), run.output + simulation.log()
    there = json.loads(summary.read_text())
    assert there["engine"] == "ray" and extract_hashes(there) == extract_hashes(here)
