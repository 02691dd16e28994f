"""The elements of a report page: escaped text, numbers in words, tables, and figures with their numbers.

Names of sites and classes and reasons of refusals come from other institutions: none of them reaches the
page, or a chart, except through `escape`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from markupsafe import Markup, escape

MISSING = "\N{EN DASH}"
THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
PRINTABLE_ROWS = 40
"""Tables of numbers up to this length are opened when the page is printed."""


def label(value: object, limit: int = 28) -> str:
    """The value as text of a chart, shortened to `limit` characters."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def join(parts: Sequence[str], separator: str = "") -> Markup:
    """The parts as one piece of HTML, escaped unless they are Markup. separator: HTML."""
    return Markup(separator).join(parts)


def build_element(tag: str, content: object, css_class: str = "") -> Markup:
    """One HTML element around content."""
    opening = f'{tag} class="{escape(css_class)}"' if css_class else tag
    return Markup(f"<{opening}>{escape(content)}</{tag}>")


def format_percent(value: float | None, digits: int = 1) -> str:
    """A share as '86.3 %'."""
    return MISSING if value is None else f"{100 * value:.{digits}f}{THIN_SPACE}%"


def format_points(value: float | None) -> str:
    """A difference of shares in percentage points, with its sign: '+3.2'."""
    return MISSING if value is None else f"{100 * value:+z.1f}".replace("-", "\N{MINUS SIGN}")


def format_decimal(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits."""
    return MISSING if value is None else f"{value:.{digits}g}"


def format_power(value: float | None) -> str:
    """A small number such as delta as '1e-5', with a minus sign that no line breaks after."""
    return MISSING if value is None else f"{value:.3g}".replace("e-0", "e-").replace("-", "\N{MINUS SIGN}")


def format_size(count: float) -> str:
    """Bytes as '12.4 MB'; 1 MB is 1,000,000 bytes."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f}{THIN_SPACE}{unit}"
    return f"{count:,.0f}{THIN_SPACE}bytes"


def duration(seconds: float) -> str:
    """Seconds as '41.2 s', '3 min 12 s' or '2 h 05 min'."""
    if round(seconds, 1) < 60:
        return f"{seconds:.{1 if seconds >= 1 else 2}f}{THIN_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{THIN_SPACE}min {rest}{THIN_SPACE}s"
    return f"{minutes // 60}{THIN_SPACE}h {minutes % 60:02d}{THIN_SPACE}min"


def format_count(count: int, noun: str) -> str:
    """The count with its noun: '1 round', '1,200 rounds'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def build_bar(text: object, share: float) -> Markup:
    """A table cell's text over a bar of that share (0 to 1) of the cell's width."""
    width = 100 * min(max(share, 0.0), 1.0)
    return Markup(f'<span class="bar" style="--share:{width:.1f}%">{escape(text)}</span>')


def build_table(columns: Sequence[str], rows: Sequence[Sequence[object]], align: str, caption: str) -> Markup:
    """A table whose first column heads its rows.

    align: one letter a column, l or r. caption: said by screen readers, not shown.
    """
    head = "".join(
        f'<th scope="col" class="{side}">{escape(name)}</th>'
        for name, side in zip(columns, align, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row" class="{side}">{escape(cell)}</th>'
            if index == 0
            else f'<td class="{side}">{escape(cell)}</td>'
            for index, (cell, side) in enumerate(zip(row, align, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return Markup(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="unseen">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def fold_content(summary: str, content: Markup, rows: int) -> Markup:
    """Content that a click on `summary` opens. rows: its length; long content is not printed."""
    printed = ' class="printed"' if rows <= PRINTABLE_ROWS else ""
    return Markup(f"<details{printed}><summary>{escape(summary)}</summary>{content}</details>")


def build_numbers_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str, align: str = ""
) -> Markup:
    """A chart's numbers as a folded table. align: as for table(); '': first column left, others right."""
    align = align or "l" + "r" * (len(columns) - 1)
    return fold_content("Numbers", build_table(columns, rows, align, caption), len(rows))


def build_panel(title: str, content: Markup, note: str = "", long: bool = False) -> Markup:
    """A part of the page with a small heading. long: whether it may break across printed pages."""
    head = build_element("h3", title) + (build_element("p", note) if note else "")
    return build_element("div", Markup(head + content), "panel long" if long else "panel")


HALF, WHOLE = 510, 1040
"""Pixels across the drawing of a chart that takes half of the page's width, and all of it."""


class Chart(Protocol):
    """A chart of server/charts/. height: pixels. count: values in it."""

    @property
    def height(self) -> int: ...

    @property
    def count(self) -> int: ...

    def drawn(self, width: int, words: str) -> Markup:
        """Draw the chart, `width` pixels wide. words: a description for people who cannot see it."""
        ...


@dataclass(frozen=True)
class Picture:
    """One chart with its title.

    name: its id on the page, [a-z-]. description: what a person who cannot see it should know.
    numbers: the table behind the chart.
    """

    name: str
    title: str
    description: str
    chart: Chart
    wide: bool = False
    numbers: Markup | None = None

    def markup(self) -> Markup:
        """The figure as HTML; of a chart of one value the numbers alone."""
        width, kind = (WHOLE, "wide") if self.wide else (HALF, "half")
        if self.chart.count < 2:
            return build_panel(self.title, self.numbers, self.description) if self.numbers else Markup("")
        drawn = self.chart.drawn(width, f"{self.title}. {self.description}")
        return Markup(
            f'<figure class="{kind}" id="chart-{self.name}">'
            f"<figcaption><h3>{escape(self.title)}</h3><p>{escape(self.description)}</p></figcaption>"
            f'<div class="drawing">{drawn}</div>{self.numbers or ""}</figure>'
        )


@dataclass(frozen=True)
class Section:
    """One heading of the page and what stands under it."""

    title: str
    parts: Sequence[Picture | Markup]
    lead: str = ""

    @property
    def anchor(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())

    def markup(self) -> Markup:
        parts = "".join(part.markup() if isinstance(part, Picture) else part for part in self.parts)
        lead = build_element("p", self.lead, "lead") if self.lead else ""
        anchor = escape(self.anchor)
        return Markup(
            f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
            f'<h2 id="{anchor}-title">{escape(self.title)}</h2>'
            f'{lead}<div class="parts">{parts}</div></section>'
        )
