"""What the Dockerfile installs, without an engine: its command lines run with a pip that only notes."""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def base_check(tmp_path: Path, base: str, release: str) -> str:
    """What the check of the base image says; '' when the build goes on."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    found = re.search(
        r"^FROM \$\{BASE\} AS checked-base\n(?:ARG .*\n)*RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE
    )
    assert found is not None
    settings = {"PATH": "/usr/bin:/bin", "BASE": base, "RELEASE": release}
    done = subprocess.run(
        ["sh", "-c", found[1]], env=settings, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (done.stdout == "")
    return done.stdout


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "base", [f"python:3.11-slim-bookworm@{DIGEST}", f"registry.example:5000/mirror/python:3.11-slim@{DIGEST}"]
)
def test_a_release_is_built_from_a_base_by_tag_and_digest(tmp_path: Path, base: str) -> None:
    assert base_check(tmp_path, base, "yes") == ""


@pytest.mark.parametrize(
    "base",
    [
        "python:3.11-slim-bookworm",
        "python",
        f"python@{DIGEST}",
        f"python:3.11@{DIGEST[:-1]}",
        f"python:3.11@{DIGEST.upper()}",
        f"python:3.11@{DIGEST} ",
        "",
    ],
)
def test_a_release_from_any_other_base_is_refused_and_a_trial_is_not(tmp_path: Path, base: str) -> None:
    assert "allowed in a release NAME:TAG@sha256:DIGEST" in base_check(tmp_path, base, "yes")
    assert base_check(tmp_path, base, "no") == ""
    assert "allowed yes or no" in base_check(tmp_path, base, "true")


def test_every_stage_comes_from_the_checked_base() -> None:
    """An image whose files were built from another base than the one that was checked would not be it."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    parents = {name: parent for parent, name in re.findall(r"^FROM (\S+) AS ([\w-]+)$", text, re.MULTILINE)}
    assert [name for name, parent in parents.items() if parent == "${BASE}"] == ["checked-base"]
    for stage in list(parents):
        above = stage
        while above != "checked-base":
            above = parents[above]


def test_nothing_is_installed_without_a_hash_but_the_wheel_that_was_just_built() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    assert re.search(r"^ENV .*PIP_REQUIRE_HASHES=1", text, re.MULTILINE)
    for line in text.splitlines():
        if "-u PIP_REQUIRE_HASHES" in line:
            assert "--no-index /wheel/" in line or "pip wheel --no-build-isolation" in line, line
    for name in ("build", "sbom"):
        lines = (ROOT / "docker" / "hashes" / f"{name}.txt").read_text().splitlines()[1:]
        assert lines and all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
        assert not re.search(r"https?://", "".join(lines))


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """The lists are worth what pip makes of them: with the settings of the image, on a file of this test."""
    wheel = tmp_path / "files" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = (ROOT / "docker" / "Dockerfile").read_text()
    settings = dict(re.findall(r"(PIP_(?:NO_DEPS|REQUIRE_HASHES|ONLY_BINARY))=(\S+)", text))
    for digest, fits in ((right, True), ("0" * 64, False)):
        (tmp_path / "list.txt").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(wheel.parent)]
        command += ["--target", str(tmp_path / str(fits)), "--requirement", str(tmp_path / "list.txt")]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == fits, done.stderr
        if not fits:
            assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("target", ["site", "operator", "site-cuda", "operator-cuda"])
def test_every_image_lists_what_is_in_it_after_the_last_installation(target: str) -> None:
    """The list itself is read from a running image by tests/containers/check_containers.py."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    stage = re.search(
        rf"^FROM \S+ AS {target}\nCOPY --from=([\w-]+) /opt/perennial /opt/perennial$", text, re.MULTILINE
    )
    assert stage is not None and stage[1].endswith("-listed")
    listed = re.search(rf"^FROM \S+ AS {stage[1]}\n(?:COPY .*\n)*RUN (.*)$", text, re.MULTILINE)
    assert listed is not None
    installed, sbom = listed[1].index("pip install"), listed[1].index("cyclonedx-py environment")
    assert installed < sbom and "--output-file /opt/perennial/sbom.json" in listed[1]


def test_the_wheels_stage_gets_every_folder_that_the_wheel_is_built_from() -> None:
    """.dockerignore lets nothing through that it does not name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert folders <= allowed, f"name in .dockerignore: {sorted(folders - allowed)}"
