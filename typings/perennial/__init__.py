"""Federated class-incremental learning that hospitals can run."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

if not (_HERE / "foundation").is_dir():
    # A checkout or an app bundle: the rooms lie beside this folder. In a wheel they lie inside it, and
    # whatever lies beside it belongs to others.
    __path__.append(str(_HERE.parent))
