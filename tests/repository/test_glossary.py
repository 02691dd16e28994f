"""The glossary: one sentence for each term, links that lead there, and renamed words that are gone."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.glossary import GLOSSARY, OFTEN_SAID, TERM, linked, pages

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"glossary\.md#([a-z-]+)\)")


def test_each_term_has_one_anchor_and_one_sentence() -> None:
    text = GLOSSARY.read_text()
    anchors = [anchor for anchor, _ in TERM.findall(text)]
    assert len(anchors) == len(set(anchors)) >= 50
    entries = re.findall(r"^- <a id=.*?(?=^- <a id=|^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(entries) == len(anchors)
    for entry in entries:
        assert entry.strip().endswith("."), entry
        assert len(entry) < 300, entry
    assert {term for _, term in TERM.findall(text)} >= OFTEN_SAID


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_a_page_links_the_terms_that_it_uses_first(page: Path) -> None:
    text = page.read_text()
    assert linked(text, page) == text, "run python -m benchmarks.glossary"
    anchors = {anchor for anchor, _ in TERM.findall(GLOSSARY.read_text())} | {"renamed"}
    assert set(LINK.findall(text)) <= anchors


def test_only_the_first_use_in_prose_is_linked() -> None:
    page = ROOT / "docs" / "methods" / "page.md"
    text = "# Replay\n\n`replay` is *replay*, and replay again.\n\n| replay |\n"
    assert linked(text, page) == text.replace("*replay*", "*[replay](../glossary.md#replay)*")


@pytest.mark.parametrize(
    "word",
    ["PastOutputs", "Workbench", "typical_epsilon", "training_places", "grouping: given", "grouping=given"],
)
def test_old_names_are_gone(word: str) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    own = {"docs/glossary.md", "tests/repository/test_glossary.py", "CHANGELOG.md"}
    ends = (".py", ".yaml", ".md", ".jsonl")
    found = [
        name
        for name in listed.stdout.splitlines()
        if name.endswith(ends) and name not in own and word in (ROOT / name).read_text()
    ]
    assert not found
