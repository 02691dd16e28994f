"""Holds a run to its first split key; a second one would let held-out samples be trained on."""

import hashlib
import json
from pathlib import Path

from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.foundation.files import make_folder, one_at_a_time, replace_file

RECORD = "split-key.sha256"


def keep_split_key(folder: Path, key: str) -> None:
    """Store the split key of a run's first request, and check that every later request has the same.

    folder: of the run in the site's state_dir. key: hexadecimal; its hash is stored. Raises ProtocolError on
    another key: a run that could change it would train on test samples, and two updates of one round by two
    splits would tell which records moved.
    """
    path = folder / RECORD
    found = hashlib.sha256(key.encode()).hexdigest()
    make_folder(folder)
    with one_at_a_time(folder):
        if not path.exists():
            replace_file(path, found.encode())
        elif path.read_text() != found:
            raise ProtocolError(
                "split_key: found another one than this run began with; a run keeps its key, and another one "
                "starts another run"
            )


def key_of_form(form: Path, runs: Path, experiment: str) -> tuple[str, str, dict[int, str]]:
    """(run, key, task -> hash of the statement that counts) of a form of `perennial withdraw --form`.

    It is for a site that keeps no key itself.
    runs: folder of the site's runs. experiment: digest of the approved experiment. Raises ConfigError where
    the form is none, or of another experiment; StateError where the site took no part in the run;
    ProtocolError where its run had another key.
    """
    try:
        content = json.loads(form.read_text())
        run, known, key = (str(content[name]) for name in ("run", "experiment", "split_key"))
        current = {int(task): str(found) for task, found in content["statements"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{form}: no form of `perennial withdraw RUN --site NAME --form FILE`") from error
    if known != experiment:
        raise ConfigError(f"{form}: of experiment {known:.12}, and the one given is {experiment:.12}")
    if not run.isalnum() or not (runs / run / RECORD).exists():
        raise StateError(
            f"{runs}: nothing is kept of run {run!r:.40}; this site took no part in it, or removed its state"
        )
    keep_split_key(runs / run, key)
    return run, key, current
