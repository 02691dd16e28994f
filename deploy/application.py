"""The app that travels: Perennial's code and one experiment, as one Flower App Bundle with one hash.

A site approves the hash, and with it both the code and the experiment (see deploy/approval.py).
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import perennial
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import APP_ROOT, RunSettings
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file
from perennial.foundation.plugins import sources_of
from perennial.models.encoder_file import TEXT_SUFFIX, as_text, content_of

ROOMS = (
    *("foundation", "data", "models", "privacy", "config", "protocol"),
    *("learning", "client", "strategies", "baselines", "server"),
)
"""What runs at the server and at sites; the engine and the command line stay at home."""
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
PUBLISHER, NAME, VERSION = "perennial", "perennial", perennial.__version__


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
    """Put the experiment, resolved, with the code below apps/name, and build its bundle.

    An encoder's file goes along beside the experiment. The same code, experiment and encoder give the same
    bytes, so the same hash, whatever the run is called. Raises ConfigError for a bad experiment, or one too
    large to travel; StateError when apps/name holds another app already.
    """
    from perennial.deploy.flower_seam import build_fab_from_disk

    resolved = load_experiment(experiment, overrides)
    name = name or resolved.name
    staged, folder = apps / f".{name}.staged", apps / name
    shutil.rmtree(staged, ignore_errors=True)
    # the rooms lie inside the package, as in a wheel, so that a checkout and a wheel give the same bundle
    package = staged / "perennial"
    for room in ROOMS:
        shutil.copytree(APP_ROOT / room, package / room, ignore=CACHES)
    shutil.copy(Path(perennial.__file__), package / "__init__.py")
    _stage_plugins(resolved, staged)
    (package / "experiments").mkdir()
    # not the run's name: a second run of the same code and experiment is the same app, approved already
    inside = f"experiments/{resolved.name}.yaml"
    resolved = _with_encoder(resolved, package / "experiments" / f"{resolved.name}.encoder{TEXT_SUFFIX}")
    replace_file(package / inside, resolved.to_yaml().encode(), mode=0o644)
    replace_file(staged / "pyproject.toml", _project(inside).encode(), mode=0o644)
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
                f"{folder}: holds another experiment or another version of the code; choose another --name"
            )
        shutil.rmtree(staged)
    else:
        staged.rename(folder)
    fab = apps / f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab"
    replace_file(fab, content, mode=0o644)
    return Application(folder, fab, digest)


def read_application(name: str, apps: Path) -> Application:
    """A staged app, as it was submitted. Raises StateError naming those there are."""
    from perennial.deploy.flower_seam import build_fab_from_disk

    folder = apps / name
    if not (folder / "pyproject.toml").is_file():
        known = ", ".join(sorted(path.parent.name for path in apps.glob("*/pyproject.toml"))) or "none yet"
        raise StateError(f"run {name!r}: no experiment of this name was submitted; submitted: {known}")
    digest = hashlib.sha256(build_fab_from_disk(folder)).hexdigest()
    return Application(
        folder, apps / f"{PUBLISHER}.{NAME}.{VERSION.replace('.', '-')}.{digest[:8]}.fab", digest
    )


def _stage_plugins(experiment: Experiment, staged: Path) -> None:
    """Put the source of other people's methods beside the package, so that sites approve it with the rest.

    Raises ConfigError where a plug-in would take the place of code that the app has already.
    """
    for target in experiment.plugins:
        for name, path in sources_of(target).items():
            copy = staged / name
            if name.startswith(f"{NAME}/"):
                if copy.exists():
                    continue  # a module of Perennial itself that travels already
                raise ConfigError(
                    f"{target}: is no part of the app; a method of one's own is a package of its own"
                )
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _with_encoder(experiment: Experiment, inside: Path) -> Experiment:
    """The experiment, changed to read its encoder from a file inside the app.

    The file is written as text, because Flower's FABs hold nothing else.
    """
    encoder, digests = experiment.encoder, experiment.digests
    if digests is None or encoder.file is None or encoder.sha256 is None:
        return experiment
    replace_file(inside, as_text(content_of(Path(encoder.file), encoder.sha256)), mode=0o644)
    moved = digests.model_copy(update={"encoder": encoder.model_copy(update={"file": inside.name})})
    return experiment.model_copy(update={"digests": moved})


def _project(experiment: str) -> str:
    """The app's pyproject.toml. Its dependencies are in the images: nothing is installed at run time."""
    settings = {**RunSettings().__dict__, "experiment": experiment}
    lines = [f'{key} = "{value}"' for key, value in settings.items() if isinstance(value, str)]
    lines += [f"{key} = {value}" for key, value in settings.items() if isinstance(value, int)]
    return (
        f'[project]\nname = "{NAME}"\nversion = "{VERSION}"\n'
        'description = "Federated class-incremental learning"\nlicense = "Apache-2.0"\ndependencies = []\n\n'
        f'[tool.flwr.app]\npublisher = "{PUBLISHER}"\n'
        'fab-include = ["**/*.py", "perennial/experiments/*", "pyproject.toml"]\n\n'
        '[tool.flwr.app.components]\nserverapp = "perennial.server.app:app"\n'
        'clientapp = "perennial.client.app:app"\n\n'
        "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n"
    )
