"""Files that hold one secret word, with which a person or a program proves that it may act."""

import secrets
from pathlib import Path

from perennial.foundation.errors import ConfigError
from perennial.foundation.files import replace_file

FEWEST_CHARACTERS = 20


def read_token(path: Path) -> str:
    """The token in a file, stripped. Raises ConfigError when others can read the file or it is too short."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token cannot be read ({error})") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read this token; allowed: mode 0600 (chmod 600 {path})")
    if len(text) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{path}: found {len(text)} characters, allowed {FEWEST_CHARACTERS} or more; "
            "`openssl rand -hex 32` makes some"
        )
    return text


def made_token(path: Path) -> str:
    """The token in a file; creates it for its owner alone if missing. Raises as read_token()."""
    if not path.exists():
        replace_file(path, f"{secrets.token_urlsafe(32)}\n".encode())
    return read_token(path)
