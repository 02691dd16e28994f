"""What the Dockerfile installs, without an engine: its command lines run with a pip that only notes."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_stage(stage: str, folder: Path, pip: str) -> list[str]:
    """Arguments of every call of pip in a stage's RUN. pip: the shell line that the stand-in ends with."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    found = re.search(rf"^FROM [\w-]+ AS {stage}\n(?:COPY .*\n)*RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None, f"no stage {stage} with one RUN"
    stand_in = folder / "pip"
    stand_in.write_text(f'#!/bin/sh\necho "$*" >>"{folder}/calls"\n{pip}\n')
    stand_in.chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", found[1]], cwd=ROOT, env=path, capture_output=True, check=False)
    assert (done.returncode == 0) == (pip != "exit 1")
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("pip", "lists"),
    [
        ("exit 0", ["site-cpu"]),
        ('case "$*" in *cpu*) exit 1;; esac', ["site-cpu", "site-cuda"]),  # an index without local versions
        ("exit 1", ["site-cpu", "site-cuda"]),
    ],
)
def test_the_image_is_built_from_any_index(tmp_path: Path, pip: str, lists: list[str]) -> None:
    expected = [f"install --requirement {name}.txt" for name in lists]
    assert run_stage("site-cpu-dependencies", tmp_path, pip) == expected


@pytest.mark.parametrize(("build", "name"), [("+cpu", "operator-cpu"), ("", "operator-cuda")])
def test_the_operators_image_keeps_the_build_of_the_sites(tmp_path: Path, build: str, name: str) -> None:
    calls = run_stage(
        "operator-cpu-dependencies", tmp_path, f'[ "$1" = list ] && echo "torch 2{build}"; exit 0'
    )
    assert calls == ["list", f"install --requirement {name}.txt"]


@pytest.mark.parametrize("name", ["site-cpu", "operator-cpu", "site-cuda", "operator-cuda"])
def test_an_image_installs_by_hash_what_the_constraints_say(name: str) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned["torch"] += "+cpu" if name.endswith("cpu") else ""
    lines = (ROOT / "docker" / "hashes" / f"{name}.txt").read_text().splitlines()[1:]
    found = [re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    versions = {match[1]: match[2] for match in found if match is not None}
    assert len(versions) == len(lines) and "flwr" in versions and "torch" in versions
    assert {key: versions[key] for key in versions.keys() & pinned.keys()} == {
        key: pinned[key] for key in versions.keys() & pinned.keys()
    }
