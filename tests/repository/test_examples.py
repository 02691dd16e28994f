"""The examples run, and show what they say."""

import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(name: str, argument: object, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What a program prints."""
    monkeypatch.setattr(sys, "argv", [name, str(argument)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_listed_short_and_tested() -> None:
    page = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", page)
    assert sorted(listed) == sorted([*PROGRAMS, "forgetting.ipynb"])
    tests = Path(__file__).read_text()
    for name in PROGRAMS:
        assert f'"{name}"' in tests, name
        assert len((EXAMPLES / name).read_text().splitlines()) <= 80, name


def test_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("first_run.py", tmp_path, monkeypatch, capsys)
    rows = [line.split() for line in out.splitlines() if re.fullmatch(r"[\d. ]+", line)]
    assert [len(row) for row in rows] == [1, 2, 3, 4, 5]
    final, forgotten = map(float, re.findall(r"(-?[\d.]+)%", out))
    assert final > 60 and -5 < forgotten < 60
    assert (tmp_path / "runs" / "first-run" / "report.html").exists()


def test_your_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("your_own_table.py", tmp_path, monkeypatch, capsys)
    assert "sites: hospital-a, hospital-b, hospital-c" in out
    assert float(re.findall(r"([\d.]+)%", out)[0]) > 70


@pytest.mark.slow
def test_compare_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("compare_strategies.py", tmp_path, monkeypatch, capsys)
    found = {
        name: float(mean) for name, mean in re.findall(r"^strategy=(\w+) +3 +([\d.]+) ±", out, re.MULTILINE)
    }
    assert found.keys() == {"fedavg", "scaffold", "fednova", "multi_factor"}
    assert min(found.values()) > 30


def test_stop_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("stop_and_resume.py", tmp_path, monkeypatch, capsys)
    assert "stopped in round 5" in out
    assert len(set(re.findall(r"[0-9a-f]{64}", out))) == 1


@pytest.mark.slow
def test_price_of_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("price_of_privacy.py", tmp_path, monkeypatch, capsys)
    without, little, much = map(float, re.findall(r"accuracy ([\d.]+)%", out))
    assert without > little > much
    planned = re.findall(r"epsilon +([\d.]+) at", out)
    assert planned == re.findall(r"own account: ([\d.]+)", out)
    assert float(planned[0]) > float(planned[1]) > 0


def test_use_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("use_a_trained_model.py", tmp_path, monkeypatch, capsys)
    pairs = re.findall(r"a (\d) is taken for a (\d)", out)
    assert len(pairs) == 8
    assert sum(one == other for one, other in pairs) >= 6


def test_to_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("to_dashboard.py", tmp_path, monkeypatch, capsys)
    rounds = [line.split()[0] for line in out.splitlines() if "train_loss" in line]
    tasks = [line.split()[0] for line in out.splitlines() if "average_accuracy" in line]
    assert rounds == ["1", "2", "3", "4"] and tasks == ["2", "4"]
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_choose_exemplars(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = run("choose_exemplars.py", 8, monkeypatch, capsys)
    rows = {line.split()[0]: list(map(float, line.split()[1:])) for line in out.splitlines()[2:]}
    assert all(one < other for one, other in zip(rows["herding"][1:], rows["random"][1:], strict=True))
    assert rows["herding"][0] == rows["nearest"][0]


def words(line: str) -> list[str]:
    return re.findall(r"[^\W\d]+", line)


def test_the_notebook_runs_from_top_to_bottom_and_shows_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code cells, in order, in one namespace, as a kernel runs them."""
    notebook = json.loads((EXAMPLES / "forgetting.ipynb").read_text())
    assert notebook["nbformat"] == 4
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"code", "markdown"}
    monkeypatch.chdir(tmp_path)
    shared: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with redirect_stdout(StringIO()) as printed:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), shared)
            # figures may differ in the last place on other machines; what is shown does not
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert [words(line) for line in shown.splitlines()] == [
                words(line) for line in printed.getvalue().splitlines()
            ]
    assert shared["forgotten"]["fine-tuning"] > shared["forgotten"]["replay"]
