"""Write docker/hashes/*.txt: every distribution that an image installs, with its version and SHA-256.

    python docker/hashes.py [LIST...]

Images are built with these lists and `pip install --require-hashes`, so that an index, a mirror or a proxy
cannot change what is installed. A list holds no address: any index that has the same files serves. Run it
again after a change of pyproject.toml or constraints.txt, on the machine type that the images are for, since
wheels differ between machine types. Nothing is installed; pip resolves, and says what it would install.
"""

import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = {
    "site-cpu": (["dicom"], "+cpu"),
    "operator-cpu": (["dicom"], "+cpu"),
    "site-cuda": (["dicom"], ""),
    "operator-cuda": (["dicom"], ""),
}
"""Targets of the Dockerfile -> (extras of pyproject.toml, local version of torch)."""
TOOLS = {"build": ["setuptools>=77"], "sbom": ["cyclonedx-bom==7.5.0"]}
"""What runs while an image is built and is not in it: it makes the wheel, and lists what is inside."""


def requirements(extras: list[str], local: str) -> list[str]:
    """What pyproject.toml asks for, with torch's build named: `===` keeps pip from taking another one.

    The version of torch is the one of constraints.txt.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = project["dependencies"] + [
        line for name in extras for line in project["optional-dependencies"][name]
    ]
    (torch,) = [line for line in constraints() if line.startswith("torch==")]
    others = [line for line in wanted if not re.match(r"torch\W", line)]
    return [f"{torch.replace('==', '===')}{local}", *others]


def constraints() -> list[str]:
    """The lines of constraints.txt."""
    return (ROOT / "constraints.txt").read_text().splitlines()


def resolve(wanted: list[str]) -> list[str]:
    """One line for each distribution that pip would install, in the order of their names."""
    others = [line for line in constraints() if not line.startswith("torch==")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--only-binary", ":all:", "--report", "-", "--constraint", "/dev/stdin", *wanted),
        ],
        input="\n".join(others),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = []
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"].lower(), item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(found)


def main(names: list[str]) -> None:
    """Write the lists of these names, or all of them."""
    for name in names or [*LISTS, *TOOLS]:
        wanted = TOOLS[name] if name in TOOLS else requirements(*LISTS[name])
        header = (
            f"# Written by docker/hashes.py for Python {sys.version_info.major}.{sys.version_info.minor} "
            f"on {platform.system()} {platform.machine()}."
        )
        lines = resolve(wanted)
        (ROOT / "docker" / "hashes" / f"{name}.txt").write_text("\n".join([header, *lines]) + "\n")
        print(f"{name}: {len(lines)} distributions")


if __name__ == "__main__":
    main(sys.argv[1:])
