"""Links the terms of docs/glossary.md: the first use of each on a page leads to its sentence.

`python -m benchmarks.glossary` adds the links to the pages that people write; programs that write
pages call `linked` themselves.
"""

import os
import re
from functools import cache
from pathlib import Path

from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
TERM = re.compile(r'^- <a id="([a-z-]+)"></a>\*\*([^*]+)\*\*', re.MULTILINE)
OFTEN_SAID = {
    "task",
    "site",
    "round",
    "update",
    "unit",
    "release",
    "policy",
    "room",
    "engine",
    "quota",
    "epsilon",
}
"""Everyday words, and words in every other sentence: their links would be noise."""
PASSED_OVER = re.compile(
    r"^```.*?^```|^#.*?$|^\|.*?$|^    .*?$|!?\[[^\]]*\]\([^)]*\)|`[^`]*`|<[^>]*>|\"[^\"`]{0,160}\"",
    re.MULTILINE | re.DOTALL,
)
"""Code, headings, tables, titles of papers, pictures and links: no place for another link."""
OTHER_SENSE = {"deploy.md": {"cluster", "digest"}}
"""Terms that a page uses in another sense: a cluster of Kubernetes, the digest of an image."""


@cache
def terms() -> dict[str, str]:
    """term -> its anchor in the glossary, the longest term first."""
    found = {term: anchor for anchor, term in TERM.findall(GLOSSARY.read_text())}
    return {term: found[term] for term in sorted(found, key=len, reverse=True) if term not in OFTEN_SAID}


def linked(text: str, page: Path) -> str:
    """The page's Markdown with the first use of each term linked; a page that has them stays as it is."""
    target = os.path.relpath(GLOSSARY, page.parent)
    for term, anchor in terms().items():
        if term in OTHER_SENSE.get(page.name, ()):
            continue
        link = f"{target}#{anchor}"
        if f"({link})" not in text and (use := _first_use(text, term)) is not None:
            start, stop = use
            text = f"{text[:start]}[{text[start:stop]}]({link}){text[stop:]}"
    return text


def _first_use(text: str, term: str) -> tuple[int, int] | None:
    """(start, stop) of the first use in prose, in the singular or the plural, with or without a capital."""
    covered = [match.span() for match in PASSED_OVER.finditer(text)]
    for match in re.finditer(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", text, re.IGNORECASE):
        if not any(start <= match.start() < stop for start, stop in covered):
            return match.span()
    return None


def pages() -> list[Path]:
    """The pages that people write."""
    generated = {ROOT / "docs" / "results.md", ROOT / "docs" / "what_leaves_a_site.md"}
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in {*generated, GLOSSARY}]


if __name__ == "__main__":
    for path in pages():
        replace_file(path, linked(path.read_text(), path).encode(), mode=0o644)
