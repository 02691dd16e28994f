"""The threat model claims no defence that no test attacks."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "threat_model.md"
ADVERSARIES = ("curious server", "malicious server", "other site", "several together", "outsider", "thief")
LINK = re.compile(r"\]\(([^)#]+\.py)#(test_\w+)\)")


def defences() -> list[list[str]]:
    """Cells of each row of the table of defences: adversary, aim, defence, what is left."""
    text = PAGE.read_text().split("## What stops them")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_test_that_the_page_links_exists() -> None:
    links = LINK.findall(PAGE.read_text())
    assert len(links) > 20
    for file, name in links:
        text = (PAGE.parent / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


def test_every_defence_links_a_test_or_says_that_there_is_none() -> None:
    rows = defences()
    assert {row[0] for row in rows} >= {*ADVERSARIES[:-1], "thief of a disk"}
    for adversary, aim, defence, left in rows:
        assert LINK.search(defence) or defence.startswith("nothing"), f"{adversary}, {aim}: no test"
        assert left, f"{adversary}, {aim}: what is left?"
