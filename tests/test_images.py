"""What the Dockerfile installs, without an engine: its command lines run with a pip that only notes."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_stage(stage: str, folder: Path, pip: str) -> list[str]:
    """Arguments of every call of pip in a stage's RUN. pip: the shell line that the stand-in ends with."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    found = re.search(rf"^FROM \w+ AS {stage}\nRUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None, f"no stage {stage} with one RUN"
    stand_in = folder / "pip"
    stand_in.write_text(f'#!/bin/sh\necho "$*" >>"{folder}/calls"\n{pip}\n')
    stand_in.chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", found[1]], cwd=ROOT, env=path, capture_output=True, check=False)
    assert (done.returncode == 0) == (pip != "exit 1")
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("pip", "builds"),
    [
        ("exit 0", ["+cpu"]),
        ('case "$*" in *+cpu*) exit 1;; esac', ["+cpu", ""]),  # an index without local versions
        ("exit 1", ["+cpu", ""]),
    ],
)
def test_the_image_is_built_from_any_index(tmp_path: Path, pip: str, builds: list[str]) -> None:
    version = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    expected = [f"install --constraint constraints.txt torch=={version}{build}" for build in builds]
    if pip != "exit 1":
        expected.append("install --no-deps --constraint constraints.txt torchvision")
    assert run_stage("torch-cpu", tmp_path, pip) == expected
