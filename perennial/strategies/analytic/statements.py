"""A site's statements of its sums: signed once, kept, and superseded where the sums change."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from perennial.client.secure_state import own_identity, own_signer
from perennial.client.site import Site
from perennial.config.strategies import hash_solver_settings
from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.files import lock_folder, make_folder, replace_file
from perennial.privacy.signed_sums import Statement, hash_lists
from perennial.protocol.messages import StatisticsRequest

FILE = "statements.json"
"""In the site's folder of a run: all its statements."""


def read_statements(folder: Path) -> dict[int, list[Statement]]:
    """task -> all versions, the latest last, in a run's folder. Raises StateError for a damaged file."""
    path = folder / FILE
    found: dict[int, list[Statement]] = {}
    try:
        for statement in map(Statement.from_json, json.loads(path.read_bytes()) if path.exists() else ()):
            found.setdefault(statement.task, []).append(statement)
    except (OSError, ValueError, TypeError) as error:
        raise StateError(
            f"{path}: damaged, or of another release ({error!r:.200}); restore it from a copy, or use the "
            "release that wrote it"
        ) from error
    return found


def keep_statements(folder: Path, found: Iterable[Statement]) -> None:
    """Store these statements beside those kept in a run's folder, each once."""
    known = [statement for versions in read_statements(folder).values() for statement in versions]
    values = [asdict(statement) for statement in dict.fromkeys([*known, *found])]
    replace_file(folder / FILE, (json.dumps(values, indent=1) + "\n").encode())


def sign_sums(site: Site, request: StatisticsRequest, sums: str) -> Statement | None:
    """The site's signed statement of sums that are about to leave, stored; None if none is asked for.

    sums: their SHA-256. Raises ProtocolError if the request's list of signers lacks this site's key.
    """
    if request.signers is None:
        return None
    own = own_signer(site.identity)
    if own.row not in request.signers:
        raise ProtocolError(f"StatisticsRequest: signers: the key of {site.name} is not among them")
    folder, secret = site.state(request.run).folder, own_identity(site.identity.state_dir)
    make_folder(folder)
    with lock_folder(folder):
        statement = Statement.make(
            secret,
            read_statements(folder).get(request.of_task, ()),
            sums,
            site=site.name,
            experiment=request.experiment,
            settings=hash_solver_settings(site.experiment.strategy, site.experiment.bounds),
            run=request.run,
            task=request.of_task,
            class_order=request.class_order,
            features=request.features,
            signers=hash_lists(request.signers)[-1],
        )
        keep_statements(folder, [statement])
    return statement
