"""A sample of benchmarks/kills.py: runs that are killed at moments that a seed draws, and resumed."""

import json
import subprocess
import sys

import pytest

SITES_PAY_AGAIN = [["charges"], ["epsilon", "charges"]]
"""What may differ, where a kill came between a site's charge and its kept reply."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_kill_changes_tasks_bits_or_rounds(seed: int) -> None:
    command = [sys.executable, "-m", "perennial.benchmarks.kills", "--sample", "4", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4
    for kill in found:
        paid = kill["differs"] in SITES_PAY_AGAIN and "private" in kill["case"]
        assert not kill["differs"] or paid, kill
