"""The app that travels: one experiment and no code, as one Flower App Bundle with one hash.

Server and sites run the Perennial that they installed. A site approves the hash, and with it the experiment
(see deploy/approval.py).
"""

import hashlib
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import perennial
from perennial.config.document import DOCUMENT, document_digest
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.yaml_file import LARGEST_FILE, parse_yaml
from perennial.deploy.app_archive import MANIFEST
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file

PUBLISHER, NAME, VERSION = "perennial", "perennial", perennial.__version__
PROJECT = "pyproject.toml"
MEMBERS = {PROJECT: 2**14, DOCUMENT: LARGEST_FILE, MANIFEST: 2**14}
"""Everything that an app may hold, and the most bytes of it."""
_log = logging.getLogger("perennial.deploy")
_VERSION = re.compile(rb'^version = "([0-9]+(\.[0-9a-z]+){1,4})"$', re.MULTILINE)


@dataclass(frozen=True)
class Application:
    """An app that is ready to be sent.

    folder: what `flwr run` takes.
    fab: the Flower App Bundle (FAB), named as Flower names it.
    digest: the FAB's SHA-256.
    """

    folder: Path
    fab: Path
    digest: str


def stage_application(experiment: Path, overrides: list[str], name: str, apps: Path) -> Application:
    """Put the experiment, resolved, below apps/name, and build its bundle.

    The same experiment gives the same bytes, so the same hash, whatever the run is called. Raises ConfigError
    for a bad experiment, or one too large to travel; StateError when apps/name holds another app already.
    """
    from perennial.deploy.flower_seam import build_fab_from_disk

    resolved = load_experiment(experiment, overrides)
    name = name or resolved.name
    staged, folder = apps / f".{name}.staged", apps / name
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    if resolved.strategy.trains and not resolved.bounds.in_words and resolved.secure is None:
        _log.warning(
            "%s: no `bounds`, so nothing limits how far one site moves the model; "
            "`bounds: {norm_multiple: 3}` does, here and in `perennial run`",
            experiment,
        )
    document = resolved.to_yaml()
    digest = document_digest(parse_yaml(document, str(experiment)))
    replace_file(staged / DOCUMENT, document.encode(), mode=0o644)
    project = project_file(VERSION, digest)
    replace_file(staged / PROJECT, project.encode(), mode=0o644)
    try:
        content = build_fab_from_disk(staged)
    except ValueError as error:
        shutil.rmtree(staged)
        raise ConfigError(f"{experiment}: cannot travel as an app of Flower: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    if folder.exists():
        if build_fab_from_disk(folder) != content:
            shutil.rmtree(staged)
            raise StateError(
                f"{folder}: holds another experiment, or is of another version; choose another --name"
            )
        shutil.rmtree(staged)
    else:
        staged.rename(folder)
    fab = apps / f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab"
    replace_file(fab, content, mode=0o644)
    return Application(folder, fab, digest)


def read_application(name: str, apps: Path) -> Application:
    """A staged app as it was submitted. Raises StateError, which names the submitted ones, without it."""
    from perennial.deploy.flower_seam import build_fab_from_disk

    folder = apps / name
    if not (folder / PROJECT).is_file():
        known = ", ".join(sorted(path.parent.name for path in apps.glob(f"*/{PROJECT}"))) or "none yet"
        raise StateError(f"run {name!r}: no experiment of this name was submitted; submitted: {known}")
    digest = hashlib.sha256(build_fab_from_disk(folder)).hexdigest()
    return Application(
        folder, apps / f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab", digest
    )


def version_of(project: bytes) -> str:
    """The version in an app's pyproject.toml; this release's where it names none."""
    found = _VERSION.search(project)
    return VERSION if found is None else found[1].decode()


def project_file(version: str, digest: str) -> str:
    """The pyproject.toml of an app, byte for byte: what Flower makes of it is the same again.

    digest: of the experiment. Its dependencies are in the installations: nothing is installed at run time.
    """
    settings = {**RunSettings().__dict__, "experiment": DOCUMENT, "digest": digest}
    lines = [f'{key} = "{value}"' for key, value in settings.items() if isinstance(value, str)]
    lines += [f"{key} = {value}" for key, value in settings.items() if isinstance(value, int)]
    return (
        f'[project]\nname = "{NAME}"\nversion = "{version}"\n'
        'description = "Federated class-incremental learning"\nlicense = "Apache-2.0"\ndependencies = []\n\n'
        f'[tool.flwr.app]\npublisher = "{PUBLISHER}"\n'
        "fab-include = [\n" + "".join(f'    "{member}",\n' for member in (DOCUMENT, PROJECT)) + "]\n\n"
        '[tool.flwr.app.components]\nserverapp = "perennial.server.app:app"\n'
        'clientapp = "perennial.client.app:app"\n\n'
        "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n"
    )
