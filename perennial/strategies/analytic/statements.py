"""A site's statements of its sums: signed once, kept, and superseded where the sums change."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from perennial.client.secure_state import own_identity, own_signer
from perennial.client.site import Site
from perennial.config.strategies import solved_by
from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.files import make_folder, one_at_a_time, replace_file
from perennial.privacy.signed_sums import Statement, lists
from perennial.protocol.messages import StatisticsRequest

FILE = "statements.json"
"""In the site's folder of a run: all its statements."""


def kept_statements(folder: Path) -> dict[int, list[Statement]]:
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
    known = [statement for versions in kept_statements(folder).values() for statement in versions]
    values = [asdict(statement) for statement in dict.fromkeys([*known, *found])]
    replace_file(folder / FILE, (json.dumps(values, indent=1) + "\n").encode())


def signed_sums(site: Site, request: StatisticsRequest, sums: str) -> Statement | None:
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
    with one_at_a_time(folder):
        statement = Statement.make(
            secret,
            kept_statements(folder).get(request.of_task, ()),
            sums,
            site=site.name,
            experiment=request.experiment,
            settings=solved_by(site.experiment.strategy, site.experiment.bounds),
            run=request.run,
            task=request.of_task,
            class_order=request.class_order,
            features=request.features,
            signers=lists(request.signers)[-1],
        )
        keep_statements(folder, [statement])
    return statement
