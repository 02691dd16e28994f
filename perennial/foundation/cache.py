"""Where this machine keeps what can be made again: converted weights, features of simulated data."""

import os
from pathlib import Path

from perennial.foundation.bounded_folder import BoundedFolder
from perennial.foundation.errors import ConfigError

VARIABLE = "PERENNIAL_CACHE"
MOST = "PERENNIAL_CACHE_GIGABYTES"
GIGABYTES = 32.0
"""Features of simulated data that this machine keeps, unless MOST says otherwise."""


def cache_folder() -> Path:
    """$PERENNIAL_CACHE, else perennial/ in the user's cache folder. It need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perennial"


def machine_features() -> BoundedFolder:
    """Folder for features of simulated samples. Raises ConfigError for a bad $PERENNIAL_CACHE_GIGABYTES."""
    said = os.environ.get(MOST) or str(GIGABYTES)
    try:
        gigabytes = float(said)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < float("inf"):
        raise ConfigError(f"${MOST}: found {said!r:.40}, allowed a number of gigabytes above 0")
    return BoundedFolder(cache_folder() / "features", gigabytes)
