"""The pictures of pages show what today's code writes: `python docs/pictures.py` makes them again."""

from pathlib import Path

import pytest

from docs import pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_picture_of_the_report_has_the_words_of_todays_report() -> None:
    said = (DOCS / "report.txt").read_text()
    assert pictures.words_of(pictures.page_of_kept_run()) == said, "run `python docs/pictures.py`"
    assert "quickstart" in said and "Forgetting" in said


def test_without_a_browser_the_program_says_so_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (DOCS / "report.png").read_bytes()
    monkeypatch.setenv("PATH", "")
    assert pictures.main([]) == 1
    assert "no browser: found none of chromium" in capsys.readouterr().err
    assert (DOCS / "report.png").read_bytes() == before


def test_each_picture_of_a_page_has_a_program() -> None:
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png")}
    assert found == {"report.png"}
