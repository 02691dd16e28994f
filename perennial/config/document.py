"""An experiment as it travels and is approved: a document with every setting, known by its own digest.

The digest is that of the document, under the schema of the release that wrote it. A later release reads the
document with its own schema, which may have further keys; the approval stays one of the same document.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from perennial.config.experiment import Experiment
from perennial.config.methods import require_code_of_sites
from perennial.config.schema import ON_DISK
from perennial.config.yaml_file import parse_yaml, validate
from perennial.foundation.errors import ConfigError, clean_text
from perennial.foundation.plugins import use_only

DOCUMENT = "experiment.yaml"
"""Its name in an app."""


def read_document(text: str, where: str, plugins: Mapping[str, str]) -> Experiment:
    """The experiment in the text of a document; its digest is the document's. where: names it in errors.

    plugins: package -> SHA-256 of its source, the
    packages that may be imported for it, as site.yaml names them. Raises ConfigError naming what is wrong.
    """
    content = parse_yaml(text, where)
    try:
        with use_only(plugins):
            experiment = validate(Experiment, content, where)
            require_code_of_sites(experiment)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    require_digest(experiment, content, compute_document_digest(content), where)
    return experiment


def require_digest(experiment: Experiment, content: dict[str, Any], expected: str, where: str) -> None:
    """Set the experiment's digest to the one that a run or an approval expects.

    content: what the experiment was read from. The digest must be that of content as a document, or of the
    settings with all defaults, since a file that a person wrote leaves settings out. Raises ConfigError when
    it is neither.
    """
    if expected not in (found := {experiment.digest, compute_document_digest(content)}):
        raise ConfigError(
            f"{where}: its settings have SHA-256 {' or '.join(sorted(found))}, the run names {expected:.64}"
        )
    vars(experiment)["digest"] = expected


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted key, with each list as one value."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def compute_document_digest(content: dict[str, Any]) -> str:
    """SHA-256 of a document's settings; like Experiment.digest, without paths on a disk."""
    settings = copy.deepcopy(content)
    for key, below in ON_DISK.items():
        _remove_keys(settings.get(key), below)
    try:
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"experiment: a value has no digest ({clean_text(str(error))})") from error


def _remove_keys(found: Any, below: Any) -> None:
    if isinstance(below, set):
        for key in below if isinstance(found, dict) else ():
            found.pop(key, None)
    elif isinstance(found, list):
        for each in found:
            _remove_keys(each, below["__all__"])
    elif isinstance(found, dict):
        for key, more in below.items():
            _remove_keys(found.get(key), more)
