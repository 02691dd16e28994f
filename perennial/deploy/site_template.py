"""The policy that a hospital begins with: the one in the site.yaml of every bundle."""

from pathlib import Path

TEMPLATE = Path(__file__).with_name("site") / "site.yaml"


def template_policy() -> str:
    """The policy block of the template of site.yaml, with its comments."""
    lines = TEMPLATE.read_text(encoding="utf-8").splitlines(keepends=True)
    start = lines.index("policy:\n")
    # up to the next line that is no part of the block
    end = next(i for i, line in enumerate(lines[start + 1 :], start + 1) if not line.startswith(" "))
    return "".join(lines[start:end])
