"""A site's look at an operator's certificate: are its own lines right, and did all see the same one?"""

import json
from pathlib import Path

from perennial.client.signing import kept_statements, own_key
from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.protocol.certificates import read_certificate, require_sound

SEEN = "certificates"
"""Folder in state_dir: by operator and run, the hashes of the certificates that this site was shown."""


def check_certificate(path: Path, state_dir: Path) -> list[str]:
    """Check an operator's certificate, and say in lines of text which of this site's sums are in it.

    The site remembers the certificate as seen. Raises StateError when it is not sound, holds a statement that
    this site did not sign, or contradicts a certificate of the same number or the one before that this site
    saw.
    """
    found, key = read_certificate(path), own_key(state_dir)
    require_sound(found)
    lines, names = [], "+".join(sorted(run.run for run in found.runs))
    for run in found.runs:
        known = kept_statements(state_dir / "runs" / run.run)
        there = {s.task: s for s in found.of_sites if s.key == key and s.run == run.run}
        own = {s.sha256 for versions in known.values() for s in versions}
        for task, statement in there.items():
            if known and statement.sha256 not in own:
                raise StateError(f"{path}: task {task}: a statement that this site did not make")
        for task in sorted(known.keys() | there.keys()):
            gone = found.superseded & {s.sha256 for s in known.get(task, ())}
            said = "withdrawn" if gone else "not in it"
            lines.append(f"own sums of task {task}: {'in it' if task in there else said}")
    file = state_dir / SEEN / f"{found.operator[:32]}-{names}.json"
    seen: dict[str, str] = json.loads(file.read_bytes()) if file.exists() else {}
    before = seen.get(str(found.number - 1), found.previous)
    if seen.get(str(found.number), found.sha256) != found.sha256 or before != found.previous:
        raise StateError(f"{path}: the operator showed this site another certificate of this number before")
    make_folder(file.parent)
    replace_file(file, json.dumps(seen | {str(found.number): found.sha256}).encode())
    return [*lines, f"certificate {found.number}, SHA-256 {found.sha256}: others can compare it with theirs"]
