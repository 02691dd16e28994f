"""The face of the package: its names are lazy, documented and typed, and a program needs no others."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import perennial
from perennial import Callback, Experiment, PerennialError, Run, Source, load_experiment, load_run, run
from perennial.foundation.errors import ConfigError
from perennial.server.summary import extract_hashes

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "experiments" / "quickstart.yaml"
SHORT = ["tasks.rounds=1", "learner.epochs=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield run(QUICKSTART, overrides=SHORT, runs=tmp_path_factory.mktemp("runs"), device="cpu")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import perennial, sys; dir(perennial); print(sorted({'torch', 'flwr', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there_and_documented() -> None:
    assert perennial.__all__ == sorted(perennial.__all__)
    for name in perennial.__all__:
        assert name in dir(perennial)
        assert inspect.getdoc(getattr(perennial, name)), name
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = perennial.runn  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def test_what_type_checkers_see_is_what_is_imported() -> None:
    import ast

    tree = ast.parse((ROOT / "perennial" / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == perennial._NAMES
    assert sorted(typed) == perennial.__all__


def test_a_run_has_matrix_summary_and_model(finished: Run) -> None:
    matrix = finished.accuracy_matrix
    assert matrix.shape == (len(finished.summary["tasks"]),) * 2
    assert np.isnan(matrix[0, 1]) and matrix[0, 0] == finished.summary["accuracy_matrix"][0][0]
    assert finished.experiment.name == "quickstart"
    assert finished.model.classes == tuple(finished.summary["classes"])
    x = torch.zeros(2, *finished.model.saved.inputs.shape, dtype=torch.uint8)
    assert finished.model.probabilities(x).sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(PerennialError, match="found inputs of shape"):
        finished.model.probabilities(x[:, :, :3])


def test_sites_of_a_program_train_in_one_pass(tmp_path: Path) -> None:
    together = run(QUICKSTART, overrides=SHORT, runs=tmp_path, device="cpu", cohort=2)
    assert together.summary["cohort"] == 2
    with pytest.raises(ConfigError, match="cohort: found 0, allowed auto, or 1 to 10000"):
        run(QUICKSTART, overrides=SHORT, runs=tmp_path, name="none", device="cpu", cohort=0)
    with pytest.raises(ConfigError, match="gpu: found 'graphs' on device cpu"):
        run(QUICKSTART, overrides=SHORT, runs=tmp_path, name="fast", device="cpu", gpu="graphs")


def test_predictions_of_files(finished: Run, tmp_path: Path) -> None:
    shape = finished.model.saved.inputs.shape
    np.savez(tmp_path / "x.npz", x=np.zeros((3, *shape), dtype=np.uint8))
    found = finished.model.predict([tmp_path / "x.npz"])
    assert len(found) == 3 and found[0] == found[0]
    assert {one.label for one in found} <= set(finished.model.classes)
    assert all(0 < one.confidence <= 1 for one in found)


def test_predictions_of_arrays_and_lists(finished: Run, tmp_path: Path) -> None:
    model, shape = finished.model, finished.model.saved.inputs.shape
    x = np.random.default_rng(1).integers(0, 256, (3, *shape), dtype=np.uint8)
    found = model.predict(x)
    assert model.predict([*x]) == model.predict(torch.from_numpy(x)) == found
    np.savez(tmp_path / "x.npz", x=x)
    path = tmp_path / "x.npz"
    assert model.predict(path) == model.predict(str(path)) == model.predict([path])
    wrong: list[Any] = [3, None, [1, 2, 3], [x[0], x[0, :, :3]], [path, x[0]]]
    for samples in wrong:
        with pytest.raises(ConfigError, match="(?s)predict: found .*, allowed paths, an array of sam"):
            model.predict(samples)
    with pytest.raises(ConfigError, match="model: found float32 inputs, allowed uint8"):
        model.predict(x / 255)
    nothing: Any = 3
    for call in (run, perennial.run_sweep):
        with pytest.raises(ConfigError, match="experiment: found 3, allowed an Experiment, a mapping"):
            call(nothing)


def test_a_folder_gives_the_same_run(finished: Run, tmp_path: Path) -> None:
    again = load_run(finished.folder)
    assert again.summary == finished.summary
    np.testing.assert_array_equal(again.accuracy_matrix, finished.accuracy_matrix)
    with pytest.raises(PerennialError, match="no finished run"):
        load_run(tmp_path)
    with pytest.raises(PerennialError, match="missing"):
        finished.model_of("site-0")


def test_an_object_is_run_as_its_file_is(finished: Run, tmp_path: Path) -> None:
    experiment = load_experiment(QUICKSTART, SHORT)
    assert isinstance(experiment, Experiment)
    seen: list[int] = []

    class Rounds(Callback):
        def on_round(self, entry: Any) -> None:
            seen.append(entry["round"])

    again = run(experiment, runs=tmp_path, workers=2, device="cpu", name="again", callbacks=[Rounds()])
    assert extract_hashes(again.summary) == extract_hashes(finished.summary)
    assert again.folder == tmp_path / "again"
    assert seen == [*range(1, 1 + finished.summary["rounds"])]
    other = run(experiment, seed=5, runs=tmp_path, device="cpu", name="other")
    assert extract_hashes(other.summary) != extract_hashes(finished.summary)


def test_a_finished_run_goes_on(finished: Run) -> None:
    again = run(resume=finished.folder, device="cpu")
    assert extract_hashes(again.summary) == extract_hashes(finished.summary)
    with pytest.raises(PerennialError, match="give an experiment"):
        run()


def test_own_arrays_become_a_model_without_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    y = rng.choice(["<calm>", "rough"], 80)
    x = rng.normal(size=(80, 3)) + 3 * (y == "rough")[:, None]
    held = Source.of(x, y, site=rng.choice(["graz", "linz"], 80))
    content = {
        "model": {"name": "features", "features": [{"name": "random", "width": 20}]},
        "strategy": {"name": "analytic", "head": "ridge"},
        "tasks": {"count": 2, "rounds": 1},
    }
    result = run(content, data=held, runs=tmp_path)
    assert sorted(result.summary["sites"]) == ["graz", "linz"]
    found = result.model.predict(x)
    assert np.mean([one.label == label for one, label in zip(found, y, strict=True)]) > 0.9
    assert "&lt;calm&gt;" in result.model._repr_html_() and "<calm>" not in result.model._repr_html_()
    assert "after task 2" in result._repr_html_()
    again = run(content, data=held, runs=tmp_path)
    assert again.folder.name == "experiment-2" and extract_hashes(again.summary) == extract_hashes(
        result.summary
    )
    # a mapping from a file whose `data:` is empty
    over = run(content | {"data": None}, data=held, runs=tmp_path, overwrite=True)
    assert over.folder == result.folder and extract_hashes(over.summary) == extract_hashes(result.summary)
    with pytest.raises(PerennialError, match=r"y has shape \(79,\) for 80 rows of x"):
        run(content, data=Source.of(x, y[1:]), runs=tmp_path, name="other")
    with pytest.raises(ConfigError, match="data: found 'digits', allowed a block of keys"):
        run(content | {"data": "digits"}, data=held, runs=tmp_path, name="other")
    assert not (tmp_path / "other").exists()


def test_a_mapping_has_the_errors_of_a_file(tmp_path: Path) -> None:
    content = {"name": "x", "data": {"source": "digits"}, "modell": {"name": "mlp"}, "tasks": {"count": 0}}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as of_file:
        load_experiment(path)
    with pytest.raises(ConfigError) as of_mapping:
        Experiment.of(**content)
    assert str(of_mapping.value) == str(of_file.value).replace(str(path), "experiment x")
    assert "http" not in str(of_mapping.value)


def test_a_class_of_the_program_itself_is_a_strategy(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(
        "from perennial import FedAvg, run\n"
        "class Mine(FedAvg):\n"
        "    '''Averaging, by another name.'''\n"
        "data = {'source': 'digits', 'sites': 2, 'samples_limit': 60}\n"
        "tasks = {'count': 1, 'rounds': 1}\n"
        "run({'data': data, 'tasks': tasks, 'model': {'name': 'mlp', 'hidden': [4]}, 'strategy': Mine})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "__main__:Mine" in (tmp_path / "runs" / "experiment" / "experiment.yaml").read_text()
