"""Writes what stands of protection in docs/: `python -m benchmarks.privacy_pages`.

That is the table of single images (threat_model.md, privacy.md), the list of what shows without a charge
(privacy.md), and what `perennial site check` says of three policies (deploy.md).
"""

import re
from pathlib import Path

import yaml

from benchmarks.leakage_by_difference import RESULTS
from benchmarks.marked_blocks import with_blocks
from benchmarks.twins.covered import COVERED
from benchmarks.what_leaves import as_table
from perennial.client.exposure import in_words
from perennial.config.site import SitePolicy
from perennial.privacy.covered import uncovered_in_words

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHECKED = re.compile(r"(```yaml\n(policy:.*?)```\n+```text\n)(.*?)(```)", re.DOTALL)


def charged() -> str:
    """What each charge covers, as a table, and what shows without one."""
    lines = ["| charge | covers |", "| --- | --- |"]
    lines += [
        f"| {kind} | {', '.join(f'`{field}`' for field in fields)} |" for kind, fields in COVERED.items()
    ]
    lines += ["", "Without a charge shows:", "", *(f"- {words};" for words in uncovered_in_words())]
    return "\n".join(lines) + "\n"


def differences() -> str:
    """What a difference tells of one record, as the program's own table."""
    text = RESULTS.with_suffix(".md").read_text()
    return text[text.index("| case") :]


def pages() -> dict[Path, str]:
    """Each page as it must be."""
    deploy = DOCS / "deploy.md"
    found = {
        DOCS / name: with_blocks((DOCS / name).read_text(), blocks)
        for name, blocks in (
            ("threat_model.md", {"exposure": as_table()}),
            ("privacy.md", {"charges": charged(), "differences": differences()}),
        )
    }
    return found | {deploy: CHECKED.sub(_checked, deploy.read_text())}


def _checked(block: re.Match[str]) -> str:
    policy = SitePolicy.model_validate(yaml.safe_load(block[2])["policy"])
    return block[1] + "".join(f"{line}\n" for line in in_words(policy)) + block[4]


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
