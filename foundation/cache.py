"""Where this machine keeps what can be made again: converted weights, features of simulated data."""

import os
from pathlib import Path

VARIABLE = "PERENNIAL_CACHE"


def cache_folder() -> Path:
    """$PERENNIAL_CACHE, else perennial/ in the user's cache folder. It need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perennial"
