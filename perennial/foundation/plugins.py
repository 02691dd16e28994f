"""Other people's strategies, data sources, networks and losses.

Code is chosen by a person and never by a file. A person names it on the command line (`--plugins`), in a
program (`run(plugins=[...])`), in site.yaml or in deploy.yaml; what nobody named is not imported, whatever an
experiment, a model or a message says. An installed package offers its methods as entry points; a folder of
one's own offers each class and function of its modules as `module:Class`.

A plug-in is known by the SHA-256 of its source, which is part of an experiment's identity, so that server and
sites that run other versions of it notice.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from perennial.foundation.errors import ConfigError, describe_failure, suggest_nearest

Kind = Literal["strategy", "source", "model", "loss"]
GROUPS: dict[Kind, str] = {
    "strategy": "perennial.strategies",
    "source": "perennial.sources",
    "model": "perennial.models",
    "loss": "perennial.losses",
}
"""Entry-point groups."""
OURS, PROGRAM = "perennial", "__main__"
_CODE = (".py", ".pyc", ".pyd", ".so")
_CACHES = "__pycache__"

Named = str | Path | type | Any
"""What a person can name: an installed package, a folder, or a class or function of the program itself."""


@dataclass(frozen=True)
class InUse:
    """The plug-ins that were named.

    packages: installed package -> the SHA-256 that its source must have; None: as it is installed.
    folders: of modules. objects: `module:Class` -> a class or function that the program handed over.
    at_site: named in site.yaml, so that errors say what to write there.
    """

    packages: Mapping[str, str | None] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    at_site: bool = False


_NOTHING = InUse()
_IN_USE: ContextVar[InUse] = ContextVar("plug-ins in use", default=_NOTHING)
_HANDED_OVER: dict[str, Any] = {}
"""Classes and functions of this program, by `module:Class`."""


def find_in_use() -> InUse:
    """The plug-ins that are in use here; nothing is where nobody named any."""
    found = _IN_USE.get()
    return found if found.at_site else InUse(found.packages, found.folders, {**_HANDED_OVER, **found.objects})


@contextmanager
def use_also(named: Iterable[Named]) -> Iterator[None]:
    """Context manager: these plug-ins are in use in addition. Raises ConfigError for one that is none.

    named: each the name of an installed package, the path of a folder (with a separator where it is text, as
    in ./methods), or a class or function.
    """
    before, named = find_in_use(), [*named]
    if before.at_site and named:
        raise ConfigError(f"plugins: found {named!s:.100}; at a site only site.yaml names plug-ins")
    packages, folders, objects = dict(before.packages), list(before.folders), dict(before.objects)
    for each in named:
        if isinstance(each, Path) or (isinstance(each, str) and ("/" in each or each in (".", ".."))):
            folders.append(_resolve_folder(Path(each)))
        elif isinstance(each, str):
            packages.setdefault(_check_package(each), None)
        else:
            objects[name_of(each)] = each
    with restore_in_use(InUse(packages, tuple(dict.fromkeys(folders)), objects, before.at_site)):
        yield


@contextmanager
def use_only(packages: Mapping[str, str]) -> Iterator[None]:
    """Context manager: no plug-ins are in use but those of these packages, as site.yaml names them.

    packages: package -> SHA-256 of its source.
    """
    with restore_in_use(InUse(dict(packages), at_site=True)):
        yield


@contextmanager
def restore_in_use(found: InUse) -> Iterator[None]:
    """Context manager: these plug-ins are in use, as in another process or before."""
    # behind all others: a module of a folder never takes the place of one that is installed
    added = [str(folder) for folder in found.folders if str(folder) not in sys.path]
    sys.path.extend(added)
    if added:
        importlib.invalidate_caches()
    token = _IN_USE.set(found)
    try:
        yield
    finally:
        _IN_USE.reset(token)
        for folder in added:
            sys.path.remove(folder)


def parse_names(named: str) -> list[str]:
    """The plug-ins in the text of a run config: names or folders with a comma between."""
    return [part.strip() for part in named.split(",") if part.strip()]


def _resolve_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"plugins: {path}: no such folder")
    return path.resolve()


def _check_package(name: str) -> str:
    offering = sorted(list_packages())
    if name not in offering:
        here = f"; for a folder write ./{name}" if name.isprintable() and Path(name).is_dir() else ""
        raise ConfigError(
            f"plugins: found {name!r:.100}{suggest_nearest(name, offering)}, which is no installed package "
            f"with plug-ins{here}; allowed: {', '.join(offering) or 'none is installed'}, or the path of a "
            "folder"
        )
    return name


def list_packages() -> set[str]:
    """Installed packages that offer a method."""
    entries = (entry for group in GROUPS.values() for entry in entry_points(group=group))
    return {_extract_package(entry.value) for entry in entries} - {OURS}


def put_in_use(found: Any) -> str:
    """Put a class or function of the program itself in use for good; returns its `module:Class`."""
    target = name_of(found)
    _HANDED_OVER[target] = found
    return target


def name_of(found: Any) -> str:
    """The `module:Class` of a class or function. Raises ConfigError for anything else."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ConfigError(
            f"plugins: found {found!r:.100}, allowed a package, a folder, a class or a function"
        )
    return f"{found.__module__}:{found.__qualname__}"


def _extract_package(target: str) -> str:
    return target.partition(":")[0].partition(".")[0].strip()


def _extract_target(entry: EntryPoint) -> str:
    return entry.value.partition("[")[0].replace(" ", "")


def _list_entries(kind: Kind, packages: Iterable[str]) -> list[EntryPoint]:
    """What these packages offer of a kind."""
    allowed = set(packages) - {OURS}
    return [entry for entry in entry_points(group=GROUPS[kind]) if _extract_package(entry.value) in allowed]


def _find_entries(kind: Kind, name: str, packages: Iterable[str]) -> list[EntryPoint]:
    """Those of a name, or of a `module:Class`."""
    return [entry for entry in _list_entries(kind, packages) if name in (entry.name, _extract_target(entry))]


def _find_module(folders: Iterable[Path], target: str) -> Path | None:
    """The file of a target's module in one of the folders. Nothing is imported."""
    if not is_target(target) or _extract_package(target) in (OURS, PROGRAM):
        return None
    parts = target.partition(":")[0].split(".")
    for folder in folders:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path
    return None


def find_target(kind: Kind, name: str) -> str | None:
    """The `module:Class` that a name stands for; None if no plug-in in use has this name.

    Nothing is imported. Raises ConfigError if two plug-ins use the same name, or a package's source is not
    the one that site.yaml names.
    """
    found = find_in_use()
    if name in found.objects or _find_module(found.folders, name) is not None:
        return name
    targets = {_extract_target(entry) for entry in _find_entries(kind, name, found.packages)}
    if len(targets) > 1:
        raise ConfigError(
            f"{kind} {name!r}: several plug-ins have it: {', '.join(sorted(targets))}; name one"
        )
    for target in targets:
        expected = found.packages[_extract_package(target)]
        if expected is not None and (sha256 := _hash_of(target)) != expected:
            raise ConfigError(
                f"{target:.100}: the installed package {_extract_package(target)!r} has SHA-256 "
                f"{sha256}, site.yaml names {expected:.64}"
            )
    return next(iter(targets), None)


def is_target(name: str) -> bool:
    """Whether a name is a `module:Class`."""
    module, _, attribute = name.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def replace_with_names(value: Any) -> Any:
    """A copy of a mapping or list with each class or function in it handed over, and named instead."""
    if isinstance(value, Mapping):
        return {key: replace_with_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_with_names(item) for item in value]
    return put_in_use(value) if inspect.isclass(value) or inspect.isfunction(value) else value


def load_ours(target: str) -> Any:
    """The object of a `module:Class` that stands in one of our own registries, never in a file."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load(kind: Kind, name: str, where: str) -> Any:
    """The class or function of a plug-in in use. where: the key of the experiment, for errors.

    Raises ConfigError for a name that no plug-in in use has, and one that cannot be imported.
    """
    found = find_in_use()
    if name in found.objects:
        return found.objects[name]
    target = find_target(kind, name)
    if target is None:
        raise refuse_unnamed(kind, name, where)
    entries = _find_entries(kind, name, found.packages)
    try:
        made = entries[0].load() if entries else _from_folder(target, found.folders, where)
    except ConfigError:
        raise
    except Exception as error:  # whatever the code of a module does
        raise ConfigError(
            f"{where}: {target!r} cannot be imported ({describe_failure(error, target)})"
        ) from error
    package = _extract_package(target)
    callable_made = inspect.isclass(made) or inspect.isfunction(made)
    if not callable_made or _extract_package(made.__module__) != package:
        raise ConfigError(f"{where}: {target} is no class or function of package {package} itself")
    return made


def _from_folder(target: str, folders: Iterable[Path], where: str) -> Any:
    """A class or function that a module of a folder defines itself."""
    path, (name, _, attribute) = _find_module(folders, target), target.partition(":")
    assert path is not None
    # before anything is imported: a module of this name that was there already comes first
    found = find_spec(_extract_package(target))
    places = [] if found is None else [found.origin or "", *(found.submodule_search_locations or ())]
    if not any(
        Path(place).resolve().is_relative_to(folder) for place in places if place for folder in folders
    ):
        raise ConfigError(f"{where}: {path} has the name of a module that is there already; rename it")
    module = importlib.import_module(name)
    if module.__file__ is None or not path.samefile(module.__file__):
        raise ConfigError(f"{where}: {path} is not the module {name}, which is {module.__file__}; rename it")
    own = {
        key: value
        for key, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    }
    if attribute not in own:
        raise ConfigError(
            f"{where}: module {name!r} defines no {attribute!r}{suggest_nearest(attribute, own)}; a plug-in "
            "is a class or function of the module itself"
        )
    return own[attribute]


def refuse_unnamed(kind: Kind, name: str, where: str) -> ConfigError:
    """Build, and do not raise, the ConfigError for a plug-in that nobody named; it says what to write."""
    packages = sorted({_extract_package(entry.value) for entry in _find_entries(kind, name, list_packages())})
    package = packages[0] if packages else _extract_package(name) if is_target(name) else "PACKAGE"
    if find_in_use().at_site:
        named = ", ".join(sorted(find_in_use().packages)) or "none"
        return ConfigError(
            f"{where}: {name:.100}: a plug-in of package {package!r:.60}, which site.yaml does not name "
            f"under `plugins`; named: {named}; to allow it, install the package, which must offer it as an "
            f"entry point, and write `plugins: {{{package:.60}: SHA256}}` in site.yaml: `site review` then "
            "says what it found"
        )
    if package in find_in_use().packages:
        own = [
            text for entry in _list_entries(kind, [package]) for text in (entry.name, _extract_target(entry))
        ]
        return ConfigError(
            f"{where}: found {name!r:.100}{suggest_nearest(name, own)}; package {package} offers as a {kind}"
            f": {', '.join(own) or 'nothing'}"
        )
    option = packages[0] if packages else "FOLDER (of the module, for instance ./methods)"
    return ConfigError(
        f"{where}: found {name!r:.100}, which is code of somebody else, and nobody named it; a file alone "
        f"never does. If you trust that code, pass --plugins {option}; in Python, run(plugins=[...]); in "
        "deploy.yaml and in a run config, `plugins`"
    )


def is_offered(kind: Kind, name: str) -> bool:
    """Whether an installed package has a method of this name, in use or not."""
    return bool(_find_entries(kind, name, list_packages()))


def require_named(kind: Kind, name: str, where: str) -> None:
    """Raises ConfigError unless a plug-in in use has this name. Nothing is imported."""
    if find_target(kind, name) is None:
        raise refuse_unnamed(kind, name, where)


def refuse_unknown(kind: Kind, name: str, ours: Iterable[str], where: str) -> ConfigError:
    """Build, and do not raise, the ConfigError for a name that is neither built in nor a plug-in's.

    ours: names of the built-in ones. where: key of the experiment.
    """
    if is_target(name) or is_offered(kind, name):
        return refuse_unnamed(kind, name, where)
    allowed = list_known(kind, ours)
    return ConfigError(
        f"{where}: found {name!r}{suggest_nearest(name, allowed)}; allowed: {', '.join(allowed)}"
    )


def list_known(kind: Kind, ours: Iterable[str]) -> list[str]:
    """All usable names of a kind, sorted: built-in ones (ours), and those of plug-ins in use."""
    return sorted({*ours, *(entry.name for entry in _list_entries(kind, find_in_use().packages))})


def find_sources(target: str) -> dict[str, Path]:
    """The plug-in's source: path from the import folder -> file, all code of its top-level package.

    Raises ConfigError when the module is not there, or has no source.
    """
    module = target.partition(":")[0]
    top = module.partition(".")[0]
    try:
        # if the plug-in is a module of Perennial, only that module counts: the app's hash covers the rest
        spec = find_spec(module if top == OURS else top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"{target!r}: no module {module!r}; install the package that has it")
    found: dict[str, Path] = {}
    if spec.submodule_search_locations is not None and top != OURS:
        for location in map(Path, spec.submodule_search_locations):
            found |= {
                f"{top}/{path.relative_to(location).as_posix()}": path
                for path in location.rglob("*")
                if path.suffix in _CODE and _CACHES not in path.parts
            }
    elif spec.origin is not None and spec.origin.endswith(".py"):
        path = Path(spec.origin)
        found[f"{module.replace('.', '/')}.py"] = path
    if not found:
        raise ConfigError(f"{target!r}: module {module!r} has no Python source that a site could approve")
    return dict(sorted(found.items()))


def compute_fingerprint(target: str) -> str:
    """SHA-256 of the source of a plug-in in use, file by file in the order of their names."""
    return _hash_of(target)


def _hash_of(target: str) -> str:
    digest = hashlib.sha256()
    if target.startswith(f"{PROGRAM}:"):
        # of a notebook or a script there is no package that a site could install
        try:
            return hashlib.sha256(inspect.getsource(find_in_use().objects[target]).encode()).hexdigest()
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"{target!r}: its source cannot be read ({error}); put it into a module"
            ) from error
    for name, path in find_sources(target).items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
