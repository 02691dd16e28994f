"""Perennial refuses to start where another project's `perennial` replaced its files."""

from pathlib import Path

import pytest

import perennial
from perennial.foundation.errors import StateError
from perennial.foundation.installation import require_own_package


def install(folder: Path, summary: str, files: str | None) -> None:
    facts = folder / "perennial-9.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: perennial\nVersion: 9.1\nSummary: {summary}\n"
    )
    if files is not None:
        (facts / "RECORD").write_text(files)


@pytest.mark.parametrize("files", ["perennial/__init__.py,,\n", None])
def test_another_projects_package_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str | None
) -> None:
    require_own_package()
    install(tmp_path, "A journaling kit", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StateError, match=r"perennial 9\.1 \(A journaling kit\).*pip uninstall perennial"):
        require_own_package()


def test_what_replaces_no_file_of_ours_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "Perennial plants", "plants/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    require_own_package()


def test_an_earlier_installation_of_ours_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path, "Federated class-incremental learning that hospitals can run", "perennial/__init__.py,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    require_own_package()


def test_a_package_that_was_overwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perennial, "__file__", "/elsewhere/perennial/__init__.py")
    with pytest.raises(StateError, match="finds /elsewhere/perennial/__init__.py, which is not the package"):
        require_own_package()
    monkeypatch.undo()
    monkeypatch.delattr(perennial, "_NAMES")
    with pytest.raises(StateError, match="is not the package of perennial-fl"):
        require_own_package()
