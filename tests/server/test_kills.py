"""A sample of benchmarks/kills.py: runs that are killed at moments that a seed draws, and resumed."""

import json
import subprocess
import sys

import pytest

from benchmarks.kill_page import page, paid_again
from benchmarks.kills import DEPLOYED, RESULTS


def test_the_page_says_what_the_results_say() -> None:
    said = page(json.loads(RESULTS.read_text()), json.loads(DEPLOYED.read_text()))
    assert RESULTS.with_suffix(".md").read_text() == said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_kill_changes_tasks_bits_or_rounds(seed: int) -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--sample", "4", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4
    for kill in found:
        assert not kill["differs"] or ("private" in kill["case"] and paid_again(kill)), kill
