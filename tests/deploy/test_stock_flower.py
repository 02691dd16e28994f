"""The app runs under Flower's own commands, with the same model; the page holds the committed table."""

import json
import subprocess
import sys

import pytest

from benchmarks.deployment import experiment
from benchmarks.stock_flower import PAGE, RESULTS, SITES, finished, rendered, started
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process


def test_the_page_holds_the_committed_table() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "run: python -m benchmarks.stock_flower"


def test_every_way_ended_with_the_model_of_one_process() -> None:
    rows = json.loads(RESULTS.read_text())["ways"]
    assert rows and all(row["same_model_as_in_process"] for row in rows.values())


def test_the_clientapp_imports_nothing_heavy_before_a_request_needs_it() -> None:
    heavy = {"torch", "pandas", "sklearn", "scipy", "matplotlib"}
    program = "import sys, perennial.client.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_plain_superlink_and_supernodes_make_the_model_of_one_process() -> None:
    content = experiment("idle", {"name": "mlp"}, len(SITES), 2)
    with started("warm", content, turns=1) as federation:
        there = finished(federation, 0)
        path, runs = federation.folder / "idle-0.yaml", federation.folder / "here"
        here = run_in_process(RunSettings(str(path), runs=str(runs)))
    assert there["model"] == here["model_sha256"]
