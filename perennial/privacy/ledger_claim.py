"""One data set, one ledger: which ledger counts what leaves of which data, noted outside both.

Two sites on one machine that read the same file or folder would each have a budget of its own for the same
records. The first one to release something notes whose data they are; another ledger is then refused. A data
set is known by its path, with all links resolved, and by the file system's number of the file or folder, so
that a link, a second mount or another name is the same one. A copy is another data set.
"""

from hashlib import sha256
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file


def require_own_data(folder: Path, data: Path, state_dir: Path) -> None:
    """Note that the ledger in state_dir counts what leaves of these data.

    Args:
        folder: where it is noted, outside every state_dir.
        data: the file or folder of the data.
        state_dir: holds the ledger.

    Raises:
        StateError: another ledger counts them already, or nothing can be noted. Nothing may leave then.
    """
    own = str(state_dir.resolve())
    try:
        found = data.stat()
        known = (f"path {data.resolve()}", f"file {found.st_dev} {found.st_ino}")
        make_folder(folder)
        for name in known:
            claim = folder / f"{sha256(name.encode()).hexdigest()[:32]}.data"
            other = claim.read_text(encoding="utf-8") if claim.exists() else ""
            if other not in ("", own) and (Path(other) / "ledger.jsonl").exists():
                raise StateError(
                    f"data.path: what leaves of {data} is counted by the ledger in {other}, and one data set "
                    f"has one ledger; allowed: state_dir: {other}, or, if that ledger counts other data now, "
                    f"to remove {claim}"
                )
            if other != own:
                replace_file(claim, own.encode())
    except OSError as error:
        raise StateError(
            f"ledger_tip: {folder}: {error.strerror}; without it the release must not leave"
        ) from error
