"""The cross-site table of the journal's newest round: how sites' records fit each other's models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perennial.live.tail import number, plain
from perennial.server.report.markup import MISSING, Markup, decimal, element, folded, join, table

MOST_ROWS = 40
"""Sites of the table; the report has all."""


@dataclass(frozen=True)
class SiteRow:
    """One site. benefit: other site -> by how much its records lower this site's error, as a share of it."""

    skill: float | None = None
    given: float | None = None
    marked: str = ""
    benefit: Mapping[str, float | None] = field(default_factory=dict)


def site_rows(content: object) -> dict[str, SiteRow]:
    """Read a journal's `cross_site` into a row for each site; parts that no run writes are left out."""
    found: dict[str, SiteRow] = {}
    for site, row in list(content.items())[:MOST_ROWS] if isinstance(content, dict) else ():
        facts: dict[str, Any] = row if isinstance(row, dict) else {}
        benefit = facts.get("benefit")
        others = list(benefit.items())[:MOST_ROWS] if isinstance(benefit, dict) else []
        found[plain(site, 80)] = SiteRow(
            number(facts.get("skill")),
            number(facts.get("given")),
            plain(facts.get("marked") or ""),
            {plain(other, 80): number(value) for other, value in others},
        )
    return found


def beside_each_other(rows: Mapping[str, SiteRow]) -> Markup:
    """Two tables as HTML: skill, gains and mark of each site, and which site gains from which."""
    if not rows:
        return Markup("")
    lead = (
        "What the sums that sites sent say of each other. Skill: how much better than a guess the others' "
        "model fits a site's records. Gains: what its own records gain the others, in the median, as a share "
        "of their error. A mark says that a site differs, and not why: another camera or other habits are "
        "enough. Talk to it."
    )
    said = [
        (site, decimal(row.skill), decimal(row.given), row.marked or MISSING) for site, row in rows.items()
    ]
    whom = [(site, *(decimal(row.benefit.get(other)) for other in rows)) for site, row in rows.items()]
    gains = table(("site", *rows), whom, "l" + "r" * len(rows), "Who gains from whom")
    return join(
        [
            element("h2", "Sites beside each other"),
            element("p", lead, "lead"),
            table(("site", "skill", "gains", "marked"), said, "lrrl", "Sites beside each other"),
            folded("Who gains from whom: each row is a site, each column whose records", gains, len(rows)),
        ]
    )
