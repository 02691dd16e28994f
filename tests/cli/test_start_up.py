"""How `perennial run` begins and ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = "from perennial.cli.start_up import import_run; import_run()\n"


def ended(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)


def lines(code: str) -> list[str]:
    done = ended(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_that_trains_has_the_whole_of_pytorch() -> None:
    """Opacus asks its compiler's parts for things half-way through their imports."""
    found = lines(
        START + "from opacus.optimizers import DPOptimizer\n"
        "import torch\n"
        "import torch._dynamo\n"
        "print(torch.linalg.cholesky_ex(torch.empty(3, 3, device='meta'))[0].shape)"
    )
    assert found == ["torch.Size([3, 3])"]


def test_the_command_ends_with_the_code_of_an_error() -> None:
    begun = "import sys; sys.argv = ['perennial', 'run', 'nowhere.yaml']\n"
    done = ended(begun + "from perennial.cli.main import main; main()")
    assert done.returncode == 2 and done.stderr.startswith("perennial: ")


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HELD = """
import torch
kept = torch.zeros(16, 1 << 20)
print(next(line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")).split()[1])
"""


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[madvise]" not in LARGE_PAGES.read_text(), reason="no large pages on demand"
)
def test_large_tensors_lie_on_large_pages_unless_the_user_says_otherwise() -> None:
    kilobytes = [
        int(ended(START + HELD, **environment).stdout) for environment in ({}, {"THP_MEM_ALLOC_ENABLE": "0"})
    ]
    assert kilobytes[0] - kilobytes[1] > 32_000


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interrupted_run_says_how_it_goes_on_and_ends_with_130(tmp_path: Path, workers: str) -> None:
    # a shell that starts this in the background has told its children to ignore the signal
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from perennial.cli.main import main; main()"
    )
    command = [sys.executable, "-c", start, "run", "experiments/quickstart.yaml"]
    process = subprocess.Popen(
        [*command, "--runs", str(tmp_path), "--workers", workers],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    journal = tmp_path / "quickstart" / "events.jsonl"
    while not journal.exists() or '"round"' not in journal.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"run --resume {tmp_path / 'quickstart'}" in said and "Traceback" not in said
