"""Maps that choose themselves: from what, that all engines and a resumed run choose alike, and the cost."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.client.plan import Plan
from perennial.config.automatic_maps import choose_maps
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy
from perennial.deploy.review import describe_asked
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.server.continuation import plan_registry
from perennial.server.curriculum import Curriculum

SMALL = {"name": "patches", "filters": 6, "size": 4, "grid": 2}
CHOICE = [SMALL, SMALL | {"symmetry": "mirror"}, SMALL | {"symmetry": "square"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four kinds of small grey pictures, which are turned by quarters."""
    tmp_path = tmp_path_factory.mktemp("own")
    draws = np.random.default_rng(0)
    for kind in ("bar", "cross", "plain", "ring"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(36):
            pixels = draws.normal(90, 25, (12, 12))
            if kind in ("bar", "cross"):
                pixels[draws.integers(4, 8)] += 110
            if kind == "cross":
                pixels[:, draws.integers(4, 8)] += 110
            if kind == "ring":
                pixels[2:10, 2:10] += 60
                pixels[4:8, 4:8] -= 60
            pixels = np.rot90(pixels, int(draws.integers(4)))
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(tmp_path / "pictures" / kind / f"{number}.png")
    return tmp_path / "pictures"


def written(place: Path, data: dict[str, Any], features: Any, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "name": "chosen",
        "seed": 5,
        "data": {"sites": 3, "validation_fraction": 0.3} | data,
        "tasks": {"count": 2, "rounds": 1},
        "model": {"name": "features", "features": features},
        "strategy": {"name": "analytic", "head": "auto"},
    }
    place.mkdir(parents=True, exist_ok=True)
    (place / "e.yaml").write_text(yaml.safe_dump(content | changes))
    return place / "e.yaml"


def finished(
    place: Path, data: dict[str, Any], features: Any, workers: int = 1, resume: str = "", **changes: Any
) -> dict[str, Any]:
    file = written(place, data, features, **changes)
    run_in_process(RunSettings(str(file), runs=str(place / "runs"), resume=resume), workers)
    return json.loads((place / "runs" / "chosen" / "summary.json").read_text())


def of(folder: Path) -> dict[str, Any]:
    return {"source": "folder", "path": str(folder), "image_size": 12, "color": "gray"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[dict[str, Any], Path]:
    """(the summary of a run that chose, its folder)."""
    place = tmp_path_factory.mktemp("one")
    return finished(place, of(folder), [CHOICE, "inputs"]), place / "runs" / "chosen"


def test_maps_follow_from_the_kind_and_shape_of_the_data_alone() -> None:
    def names(shape: tuple[int, ...], stored: str = "uint8", network: bool = True) -> list[str]:
        found = choose_maps(shape, stored, network=network)
        return ["choice" if isinstance(each, list) else each["name"] for each in found]

    assert names((30,), "float32") == ["inputs", "pairs"]
    assert names((3000,), "float32") == ["inputs"]
    assert names((6000,), "float32") == ["random"]
    assert names((1, 28, 28)) == ["choice", "inputs"]
    assert names((3, 64, 64)) == ["pretrained", "choice", "random"]
    assert names((3, 64, 64), network=False) == ["choice", "random"]
    assert names((1, 4, 64)) == ["inputs", "random"]
    assert names((1, 28, 28), "float32") == ["inputs", "random"]
    wide = choose_maps((3, 96, 128), "uint8", network=True)
    assert wide[0]["image_size"] == 128 and wide[1][0]["image_size"] == [24, 32]
    assert [each.get("symmetry") for each in wide[1]] == [None, "mirror", "rectangle"]


def test_auto_is_written_out_when_the_file_is_read(tmp_path: Path, folder: Path) -> None:
    rows = [f"{number},{number % 7},{'ab'[number % 2]}" for number in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,label", *rows]) + "\n")
    table = load_experiment(written(tmp_path, {"source": "csv", "path": "t.csv"}, "auto"))
    pictures = load_experiment(written(tmp_path, of(folder), "auto"))
    digits = load_experiment(written(tmp_path, {"source": "digits"}, "auto"))
    assert [found.name for found in table.model.maps] == ["inputs", "pairs"]
    for found in (pictures, digits):
        assert found.model.features is not None
        choice, inputs = found.model.features
        assert isinstance(choice, tuple) and len(choice) == 3 and not isinstance(inputs, tuple)
        assert inputs.name == "inputs"
        # what is written is what sites approve, and it is read again as it is
        (tmp_path / "again.yaml").write_text(found.to_yaml())
        assert load_experiment(tmp_path / "again.yaml").digest == found.digest
    own = {"source": "folder", "classes": ["a", "b"], "image_size": 12, "color": "gray"}
    deployed = load_experiment(written(tmp_path, own, "auto"))
    assert deployed.model == pictures.model
    reviewed = "\n".join(describe_asked(deployed, SitePolicy(), None))
    assert "the one of these that validation samples prefer (patches: patches of two" in reviewed


def test_what_cannot_choose_is_refused_with_what_to_write(tmp_path: Path) -> None:
    data = {"source": "digits"}
    private = {"mode": "sample", "noise_multiplier": 2.0, "release": "sums"}
    with pytest.raises(ConfigError, match=r"found auto with privacy.*write the maps out, as \[inputs\]"):
        load_experiment(written(tmp_path, data, "auto", privacy=private))
    with pytest.raises(ConfigError, match="allowed: head: auto, or one of the maps"):
        load_experiment(written(tmp_path, data, [CHOICE], strategy="analytic"))
    with pytest.raises(ConfigError, match="choice with 'projection'"):
        model = {"name": "features", "features": [CHOICE], "projection": 20}
        load_experiment(written(tmp_path, data, [CHOICE], model=model))


@pytest.mark.parametrize("how", [{"workers": 2}, {"secure": {}}])
def test_workers_and_masks_choose_alike(
    tmp_path: Path, folder: Path, one: tuple[dict[str, Any], Path], how: dict[str, Any]
) -> None:
    other = finished(tmp_path, of(folder), [CHOICE, "inputs"], **how)
    assert other["model_sha256"] == one[0]["model_sha256"]
    assert other["map_choice"] == one[0]["map_choice"]


def test_the_model_is_that_of_the_chosen_maps_and_the_report_says_what_was_tried(
    tmp_path: Path, folder: Path, one: tuple[dict[str, Any], Path]
) -> None:
    found, run = one
    tried = found["map_choice"]
    plain, *turned = "patches", "patches (symmetry mirror)", "patches (symmetry square)"
    assert sorted(each["maps"] for each in tried) == [[plain], *([name] for name in turned)]
    chosen = tried[0]["maps"][0]
    assert [each["map"] for each in found["analytic"]["maps"]] == [chosen, "inputs"]
    assert found["analytic"]["width"] == 2 * 6 * 2 * 2 + 144 + 1
    symmetry = chosen.removeprefix("patches (symmetry ").removesuffix(")")
    alone = SMALL | ({} if chosen == plain else {"symmetry": symmetry})
    direct = finished(tmp_path / "direct", of(folder), [alone, "inputs"])
    assert direct["analytic"]["sums_sha256"] == found["analytic"]["sums_sha256"]
    assert direct["accuracy_matrix"] == found["accuracy_matrix"]
    page = (run / "report.html").read_text()
    assert "The maps to choose among" in page and "patches (symmetry square)" in page


def test_a_choice_is_made_in_task_1_and_no_other_map_is_asked_for_later(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped after task 1 goes on with what it chose, to the same bits."""
    whole = finished(tmp_path / "whole", of(folder), [CHOICE])
    events = (tmp_path / "whole" / "runs" / "chosen" / "events.jsonl").read_text().splitlines()
    up = [event["bytes_up"] for event in map(json.loads, events) if event["event"] == "round"]
    assert up[0] > 3.5 * up[1]
    finish = Curriculum._finish_task

    def stop(self: Curriculum, task: int) -> None:
        if task == 2:
            raise KeyboardInterrupt
        finish(self, task)

    monkeypatch.setattr(Curriculum, "_finish_task", stop)
    with pytest.raises(KeyboardInterrupt):
        finished(tmp_path / "stopped", of(folder), [CHOICE])
    monkeypatch.setattr(Curriculum, "_finish_task", finish)
    again = finished(tmp_path / "stopped", of(folder), [CHOICE], resume="yes")
    assert again["model_sha256"] == whole["model_sha256"] and again["map_choice"] == whole["map_choice"]


def test_check_says_what_choosing_costs_and_a_site_answers_no_more(tmp_path: Path) -> None:
    file = written(tmp_path, {"source": "digits", "samples_limit": 150}, [CHOICE, "inputs"])
    done = CliRunner().invoke(app, ["check", str(file)])
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "one of these maps is chosen in task 1, for the whole run: patches, patches (sym" in told
    assert "to choose, 3 more messages of sums from each site" in told
    choosing, plain = (
        Plan(experiment, plan_registry(experiment))
        for experiment in map(
            Experiment.model_validate,
            (
                yaml.safe_load(file.read_text()) | {"model": {"name": "features", "features": features}}
                for features in ([CHOICE, "inputs"], [SMALL, "inputs"])
            ),
        )
    )
    for kind in ("statistics", "compare_heads"):
        assert choosing.most(kind, 1) == plain.most(kind, 1) + 3
    assert choosing.count_questions() == plain.count_questions() + 3 * 15


def test_a_withdrawn_site_has_the_others_choose_maps_and_head_again(
    tmp_path: Path, one: tuple[dict[str, Any], Path]
) -> None:
    found, run = one
    assert found["analytic"]["withdrawable"]
    shutil.copytree(run, tmp_path / "copy")
    arguments = ["withdraw", str(tmp_path / "copy"), "--site", "site-0", "--shrinkage", "0.1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "asked again by: perennial run --resume" in done.output
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "copy")])
    assert done.exit_code == 0, done.output
    again = json.loads((tmp_path / "copy" / "summary.json").read_text())
    assert again["analytic"]["sums_sha256"] != found["analytic"]["sums_sha256"]
    assert again["map_choice"] and again["head_choice"]
