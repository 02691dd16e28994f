"""Builds objects from the keys of an experiment, which are checked against the constructor's keywords."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from perennial.foundation.errors import ConfigError, suggest_nearest

T = TypeVar("T")
Convert = Callable[[str, Any, Any], Any]
"""(where, annotation, value found) -> value to pass on; raises ConfigError."""


def build(
    make: Callable[..., T],
    name: str,
    values: Mapping[str, Any],
    where: str,
    *,
    first: tuple[Any, ...] = (),
    convert: Convert | None = None,
) -> T:
    """make(*first, **values), with every value checked against its annotation.

    name: of what is built, for errors. where: the key of the experiment that holds the values. first:
    positional arguments that are no keys. convert: turns one value into its argument; default: checked().
    Raises ConfigError naming the key, what was found and what is allowed.
    """
    function = make.__init__ if inspect.isclass(make) else make
    hints = get_type_hints(function)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = [item for item in inspect.signature(make).parameters.items() if item[1].kind not in kinds]
    if len(found) < len(first):
        raise ConfigError(
            f"{where}: {name}: takes {len(found)} arguments, allowed {len(first)} before its keys"
        )
    keywords = dict(found[len(first) :])
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in keywords:
            allowed = ", ".join(keywords) or "no key"
            raise ConfigError(
                f"{where}: unknown key {key!r}{suggest_nearest(key, keywords)}; {name} takes: {allowed}"
            )
        converted[key] = (convert or convert_value)(f"{where}.{key}", hints.get(key, Any), value)
    missing = [
        key
        for key, keyword in keywords.items()
        if keyword.default is inspect.Parameter.empty and key not in converted
    ]
    if missing:
        raise ConfigError(f"{where}: {name} needs {', '.join(missing)}")
    try:
        return make(*first, **converted)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error
    except AttributeError as error:
        if "Module.__init__()" not in str(error):
            raise
        raise ConfigError(f"{where}: {name}: {error}; call super().__init__() first") from error


def convert_value(where: str, hint: Any, value: Any) -> Any:
    """Convert value to the type `hint`. Raises ConfigError naming `where` and what is wrong with it."""
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=False)).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(f"{where}: found {value!r}; {fault['msg'][0].lower()}{fault['msg'][1:]}") from None
