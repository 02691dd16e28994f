"""Whether what is installed is this package: another project has the name `perennial` on package indexes."""

from importlib.metadata import Distribution, distributions
from pathlib import Path

import perennial
from perennial.foundation.errors import StateError

DISTRIBUTION = "perennial-fl"
_PACKAGE = Path(__file__).resolve().parents[1]
_SUMMARY = "Federated class-incremental learning that hospitals can run"
"""As pyproject.toml says it; an older installation of ours has it under the name `perennial`."""


def require_own_package() -> None:
    """Refuse to start where files of the other distribution `perennial` lie over ours, or before them.

    Both have an import package of that name, so whichever was installed last has overwritten the other.
    What cannot be seen from here is a folder earlier on the path that hides this whole package.

    Raises:
        StateError: with what was found, and the commands that mend it.
    """
    found = getattr(perennial, "__file__", None)
    mixed = found is None or Path(found).resolve().parent != _PACKAGE or "_NAMES" not in vars(perennial)
    for other in distributions(name="perennial"):
        if (
            other.metadata["Name"] == "perennial"
            and other.metadata["Summary"] != _SUMMARY
            and _has_our_files(other)
        ):
            raise StateError(
                f"installation: found the distribution perennial {other.version} "
                f"({other.metadata['Summary'] or 'no summary'!s:.80}), another project whose files replace "
                f"those of {DISTRIBUTION}; {_MENDED}"
            )
    if mixed:
        raise StateError(
            f"installation: `import perennial` finds {found}, which is not the package of {DISTRIBUTION} in "
            f"{_PACKAGE}; {_MENDED}"
        )


_MENDED = f"run: pip uninstall perennial {DISTRIBUTION}, and then: pip install {DISTRIBUTION}"


def _has_our_files(other: Distribution) -> bool:
    """Whether a distribution has files in a package `perennial`; true where it does not list its files."""
    return other.files is None or any(path.parts[0] == "perennial" for path in other.files)
