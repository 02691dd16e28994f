"""Reads small files that a command names: keys and passphrases."""

from pathlib import Path

from perennial.foundation.errors import ConfigError


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises ConfigError naming the file when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The file's text; errors as read_bytes(), and for a file that is not UTF-8 text."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: no UTF-8 text") from None
