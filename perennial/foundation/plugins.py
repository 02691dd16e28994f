"""Other people's strategies, data sources, models and losses: entry points, or `module:Class`.

A plug-in is known by the SHA-256 of its source, which is part of an experiment's identity, so that server and
sites that run other versions of it notice.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from perennial.foundation.errors import ConfigError, nearest

Kind = Literal["strategy", "source", "model", "loss"]
GROUPS: dict[Kind, str] = {
    "strategy": "perennial.strategies",
    "source": "perennial.sources",
    "model": "perennial.models",
    "loss": "perennial.losses",
}
"""Entry-point groups."""
OURS, PROGRAM = "perennial", "__main__"
_ALLOWED: ContextVar[Mapping[str, str] | None] = ContextVar("allowed plug-ins", default=None)
"""Packages that may be imported, with the SHA-256 of their sources; None: any."""


@contextmanager
def only(allowed: Mapping[str, str] | None) -> Iterator[None]:
    """Context manager: no plug-ins are found or imported but those of these packages at these hashes.

    allowed: package -> SHA-256 of its source; None: any plug-in.
    """
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def _require_allowed(target: str) -> None:
    """Raises ConfigError for a package that the block does not allow, before anything of it is imported."""
    allowed, package = _ALLOWED.get(), target.partition(":")[0].partition(".")[0]
    if allowed is None or package == OURS:
        return
    if package not in allowed:
        raise ConfigError(
            f"{target:.100}: a plug-in of package {package!r:.60}, which site.yaml does not name under "
            f"`plugins`; named: {', '.join(sorted(allowed)) or 'none'}; to allow it, install the package and "
            f"write `plugins: {{{package:.60}: SHA256}}` in site.yaml: `site review` then says what it found"
        )
    if (found := _hash_of(target)) != allowed[package]:
        raise ConfigError(
            f"{target:.100}: the installed package {package!r} has SHA-256 {found}, site.yaml names "
            f"{allowed[package]:.64}"
        )


def target_of(kind: Kind, name: str) -> str | None:
    """The `module:Class` that a name stands for; None if no installed plug-in has this name.

    Raises ConfigError if two installed packages use the same name.
    """
    if is_target(name):
        return name
    found = {entry.value.replace(" ", "") for entry in entry_points(group=GROUPS[kind], name=name)}
    if len(found) > 1:
        raise ConfigError(f"{kind} {name!r}: several packages offer it: {', '.join(sorted(found))}; name one")
    return next(iter(found), None)


def is_target(name: str) -> bool:
    """Whether a name is a `module:Class`."""
    module, _, attribute = name.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def with_names(value: Any) -> Any:
    """A copy of a mapping or list with each class in it replaced by its `module:Class`."""
    if isinstance(value, Mapping):
        return {key: with_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_names(item) for item in value]
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def load(kind: Kind, target: str, where: str) -> Any:
    """The object that `module:Class` names. where: the key of the experiment, for errors.

    Raises ConfigError when it cannot be imported.
    """
    _require_allowed(target)
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"{where}: {target!r} cannot be imported ({error}); install the package that has it, or put its "
            "folder on PYTHONPATH"
        ) from error
    except AttributeError:
        offered = [name for name in vars(import_module(module)) if not name.startswith("_")]
        raise ConfigError(
            f"{where}: module {module!r} has no {attribute!r}{nearest(attribute, offered)}"
        ) from None


def refuse_unknown(kind: Kind, name: str, ours: Iterable[str], where: str) -> ConfigError:
    """Build, and do not raise, the ConfigError for a name that is neither built in nor installed.

    ours: names of the built-in ones. where: key of the experiment.
    """
    allowed = known(kind, ours)
    return ConfigError(
        f"{where}: found {name!r}{nearest(name, allowed)}; allowed: {', '.join(allowed)}, or module:Class"
    )


def known(kind: Kind, ours: Iterable[str]) -> list[str]:
    """All usable names of a kind, sorted: built-in ones (ours) and installed plug-ins."""
    return sorted({*ours, *(entry.name for entry in entry_points(group=GROUPS[kind]))})


@lru_cache(maxsize=64)
def sources_of(target: str) -> dict[str, Path]:
    """The plug-in's source: path from the import folder -> file, every .py file of its top-level package.

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
        raise ConfigError(
            f"{target!r}: no module {module!r}; install the package that has it, or put its folder on "
            "PYTHONPATH"
        )
    found: dict[str, Path] = {}
    if spec.submodule_search_locations is not None and top != OURS:
        for location in map(Path, spec.submodule_search_locations):
            found |= {
                f"{top}/{path.relative_to(location).as_posix()}": path for path in location.rglob("*.py")
            }
    elif spec.origin is not None and spec.origin.endswith(".py"):
        path = Path(spec.origin)
        found[f"{module.replace('.', '/')}.py"] = path
    if not found:
        raise ConfigError(f"{target!r}: module {module!r} has no Python source that a site could approve")
    return dict(sorted(found.items()))


def fingerprint(target: str) -> str:
    """SHA-256 of the plug-in's source, file by file in the order of their names."""
    _require_allowed(target)
    return _hash_of(target)


def _hash_of(target: str) -> str:
    digest = hashlib.sha256()
    if target.startswith(f"{PROGRAM}:"):
        # of a notebook or a script there is no package that a site could install
        try:
            return hashlib.sha256(inspect.getsource(load("strategy", target, target)).encode()).hexdigest()
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"{target!r}: its source cannot be read ({error}); put it into a module"
            ) from error
    for name, path in sources_of(target).items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
