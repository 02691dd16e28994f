"""The wheels that a machine without a package index lacks, in the versions that are installed here."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for: its Python, and the platforms whose wheels it takes."""

    python: str = "3.12"
    platforms: Sequence[str] = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

    @property
    def environment(self) -> dict[str, str]:
        """For markers of requirements."""
        return {"python_version": self.python, "python_full_version": f"{self.python}.0"}

    @property
    def options(self) -> list[str]:
        """For pip."""
        platforms = [word for platform in self.platforms for word in ("--platform", platform)]
        return ["--only-binary=:all:", "--python-version", self.python, *platforms]


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_there(lines: str) -> dict[str, str]:
    """Versions by package, from the output of `pip list --format=freeze` there; '' for a name alone.

    The local part of a version (+cu130) says how it was built; no index has it.
    """
    found = {}
    for line in lines.splitlines():
        name, _, version = line.strip().partition("==")
        if name and not name.startswith(("#", "-")):
            found[normal(name)] = version.split("+")[0]
    return found


def lacking(requirements: Sequence[str], there: Mapping[str, str], target: Target) -> dict[str, str]:
    """Version by package of what the requirements need and is not there, as it is installed here.

    What a package that is there needs is there too. Raises RuntimeError naming a package that is not
    installed here, or one whose version there is outside what is asked for.
    """
    found: dict[str, str] = {}
    waiting = [(Requirement(text), "the project") for text in requirements]
    while waiting:
        wanted, by = waiting.pop()
        name = normal(wanted.name)
        if name in there:
            if there[name] and not wanted.specifier.contains(there[name], prereleases=True):
                raise RuntimeError(f"{name}: there is {there[name]}, and {by} needs {wanted}")
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise RuntimeError(f"{name}: not installed here; {by} needs {wanted}") from None
        known = name in found
        found[name] = package.version
        for text in package.requires or ():
            needed = Requirement(text)
            extras = [*wanted.extras, *([] if known else [""])]
            if needed.marker is None:
                applies = not known
            else:
                applies = any(needed.marker.evaluate(target.environment | {"extra": e}) for e in extras)
            if applies:
                waiting.append((needed, name))
    return dict(sorted(found.items()))


def download(out: Path, there: Mapping[str, str], target: Target, extras: Sequence[str]) -> list[str]:
    """Bring the wheels that are lacking to out; returns name==version of each.

    extras: of the project. Raises RuntimeError with pip's words where a wheel for the target is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    missing = [f"{name}=={version}" for name, version in lacking(wanted, there, target).items()]
    if missing:
        _pip("download", "--quiet", "--no-deps", "--dest", str(out), *target.options, *missing)
    return missing


def _pip(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {words[0]}: {done.stderr.strip()[-2000:]}")
    return done.stdout
