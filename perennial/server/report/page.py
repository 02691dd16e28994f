"""One self-contained page around the sections of a report, with a policy against injection."""

import base64
import hashlib
from collections.abc import Sequence

from perennial.server.charts.curves import LINE_STYLES, SHADES
from perennial.server.report.markup import Markup, Section, escape

_DASHES = ("none", "8 4", "2 4", "8 3 2 3", "13 4", "13 3 2 3")
_STOPS = 4
"""Steps between the five colours --scale-0 to --scale-4."""


def _build_look_rules() -> str:
    rules = []
    for look in range(LINE_STYLES):
        colour = f"var(--c{look + 1})"
        rules += [
            f".line.l{look}, .error.l{look} {{ stroke: {colour}; }}",
            f".line.l{look} {{ stroke-dasharray: {_DASHES[look]}; }}",
            f".dot.l{look}, .end.l{look}, .area.l{look} {{ fill: {colour}; }}",
            f".dot.l{look} {{ stroke: {colour}; }}",
        ]
    return "\n".join(rules)


def _build_shade_rules() -> str:
    rules = []
    for shade in range(SHADES + 1):
        stop, rest = divmod(shade * _STOPS, SHADES)
        share = 100 * rest / SHADES
        colour = f"var(--scale-{stop})"
        if rest:
            colour = f"color-mix(in srgb, var(--scale-{stop + 1}) {share:g}%, {colour})"
        rules.append(f".s{shade} {{ fill: {colour}; }}")
    return "\n".join(rules)


CHARTS = f"""
.drawing {{ overflow-x: auto; }}
.chart {{ display: block; width: 100%; height: auto; font-variant-numeric: tabular-nums; }}
.half .chart {{ min-width: 20rem; }} .wide .chart {{ min-width: 38rem; }}
.chart text {{ font-size: 12.5px; }} .tick, .title {{ fill: var(--quiet); }}
.value, .within {{ fill: var(--ink); }} .within.deep {{ fill: var(--surface); }}
.within {{ pointer-events: none; }}
.grid {{ stroke: var(--rule); }} .base {{ stroke: var(--quiet); }} .band {{ fill: var(--band); }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
.line.reference {{ stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 4; }}
.error {{ fill: none; stroke-width: 1.2; }} .error.ink {{ stroke: var(--ink); }}
.area {{ opacity: .16; }} .dot.l4, .dot.l5 {{ fill: none; stroke-width: 2; }}
.hit {{ fill: transparent; }} .hit:hover {{ fill: color-mix(in srgb, var(--ink) 6%, transparent); }}
.cell:hover {{ opacity: .85; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .15rem 1.2rem; margin: 0 0 .5rem; padding: 0;
  list-style: none; font-size: .84rem; }}
.key {{ width: 22px; height: 10px; margin-right: .4rem; vertical-align: middle; }}
{_build_look_rules()}
.dot.l4, .dot.l5 {{ fill: none; }}
{_build_shade_rules()}
"""

LIGHT = """
  --page: #fbfaf7; --surface: #ffffff; --ink: #1c2621; --quiet: #5c6862; --rule: #e3e1d9; --band: #f4f2ec;
  --accent: #17694b; --wash: #e6f0ea;
  --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #b0558d; --c5: #b98300; --c6: #3a96cc;
  --scale-0: #f5f7f3; --scale-1: #c9e2d3; --scale-2: #8ac3a6; --scale-3: #277a57; --scale-4: #0c4a33;
  --idle: #eeece5; --joined: #4f9c7c;
  --shadow: 0 1px 2px rgb(28 38 33 / 5%), 0 4px 16px rgb(28 38 33 / 4%);
"""
DARK = """
  --page: #101512; --surface: #171e1a; --ink: #e5ebe7; --quiet: #9caaa2; --rule: #2b3630; --band: #1b231f;
  --accent: #7fcfa8; --wash: #1d2f26;
  --c1: #5ab4f0; --c2: #f58b4c; --c3: #3cc79b; --c4: #e29ac4; --c5: #f0b840; --c6: #a6dcfa;
  --scale-0: #19221d; --scale-1: #21463a; --scale-2: #2f7458; --scale-3: #55b088; --scale-4: #b4ecd0;
  --idle: #1d2521; --joined: #4a9d7b;
  --shadow: none;
"""

RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; scroll-padding-top: 3.5rem; }
body {
  margin: 0; background: var(--page); color: var(--ink); font-size: 1rem; line-height: 1.55;
  font-family: Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  -webkit-font-smoothing: antialiased; overflow-wrap: break-word;
}
header, main, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 3.5rem; }
.brand {
  display: flex; align-items: center; gap: .5rem; margin: 0 0 1.1rem; color: var(--accent);
  font-size: .8rem; font-weight: 600; letter-spacing: .04em;
}
.brand svg { width: 1.15rem; height: 1.15rem; }
h1 { margin: 0; font-size: clamp(1.9rem, 5vw, 2.9rem); line-height: 1.1; letter-spacing: -.025em;
  font-weight: 650; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .8rem 0 0; padding: 0;
  list-style: none; color: var(--quiet); font-size: .92rem; }
.story { max-width: 46rem; margin: 1.6rem 0 0; font-size: 1.16rem; line-height: 1.5; text-wrap: pretty; }
.alert { max-width: 46rem; margin: 1.6rem 0 0; padding: .9rem 1.2rem; border-left: 4px solid var(--c2);
  background: var(--band); border-radius: 0 10px 10px 0; }
.alert p { margin: 0; } .alert ul { margin: .4rem 0 0; padding-left: 1.2rem; }
.cards {
  display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; margin: 2rem 0 0; padding: 0;
    overflow: hidden;
  border: 1px solid var(--rule); border-radius: 14px; background: var(--rule); box-shadow: var(--shadow);
}
.card { padding: 1.05rem 1.2rem 1.1rem; background: var(--surface); }
.card dt { color: var(--quiet); font-size: .84rem; }
.card dd { margin: .2rem 0 0; }
.card .value { display: block; font-size: 1.65rem; line-height: 1.2; font-weight: 600;
  letter-spacing: -.02em; }
.card .value small { font-size: .58em; font-weight: 500; letter-spacing: 0; color: var(--quiet); }
.card .note { display: block; margin-top: .3rem; color: var(--quiet); font-size: .82rem; line-height: 1.4; }
.card.chief .value { color: var(--accent); }
nav {
  position: sticky; top: 0; z-index: 5; margin-top: 2rem;
    background: color-mix(in srgb, var(--page) 92%, transparent);
  backdrop-filter: blur(8px); border-bottom: 1px solid var(--rule);
}
nav ul {
  display: flex; gap: 1.2rem; max-width: 72rem; margin: 0 auto; padding: .65rem 1.5rem; list-style: none;
  overflow-x: auto; white-space: nowrap; font-size: .9rem; scrollbar-width: none;
}
nav a { color: var(--quiet); text-decoration: none; }
nav a:hover, nav a:focus-visible { color: var(--accent); }
section { margin-top: 3rem; }
h2 { margin: 0 0 .3rem; font-size: 1.45rem; letter-spacing: -.015em; font-weight: 640; }
h3 { margin: 0; font-size: 1rem; font-weight: 620; }
.lead { max-width: 46rem; margin: 0; color: var(--quiet); text-wrap: pretty; }
.parts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.25rem;
  margin-top: 1.1rem; align-items: start; }
.parts > * { grid-column: 1 / -1; }
.parts > .half { grid-column: auto; align-self: stretch; }
figure, .panel {
  margin: 0; padding: 1.2rem 1.3rem 1rem; background: var(--surface); border: 1px solid var(--rule);
  border-radius: 14px; box-shadow: var(--shadow); min-width: 0;
}
figcaption p, .panel > p { margin: .15rem 0 .7rem; color: var(--quiet); font-size: .88rem;
  line-height: 1.45; }
.panel > h3 + .scroll { margin-top: .6rem; }
details { margin-top: .6rem; font-size: .88rem; }
summary { width: fit-content; color: var(--quiet); cursor: pointer; border-radius: 4px; }
summary:hover { color: var(--accent); }
details[open] > summary { margin-bottom: .5rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.scroll { overflow: auto; max-height: 48rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .8rem .42rem 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  unicode-bidi: isolate; }
th:last-child, td:last-child { padding-right: .2rem; }
tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--surface); color: var(--quiet); font-weight: 500;
  font-size: .84rem; vertical-align: bottom; z-index: 1; }
tbody th { font-weight: 500; max-width: 16rem; }
.l { text-align: left; } .r { text-align: right; white-space: nowrap; }
.bar { display: block; min-width: 5.5rem; padding-bottom: .3rem; position: relative; }
.bar::before, .bar::after { content: ""; position: absolute; left: 0; bottom: 0;
  height: 3px;
  border-radius: 2px; width: 100%; background: var(--idle); }
.bar::after { width: var(--share); background: var(--joined); }
.flag { padding: .05rem .45rem; border-radius: 99px; border: 1px solid var(--c2); color: var(--c2);
  font-size: .8rem; }
.quiet, .interval { color: var(--quiet); }
.interval { font-size: .86em; }
.alarms { max-width: 46rem; margin: 1.6rem 0 0; padding: .1rem 0 .1rem 1.1rem;
  border-left: 4px solid var(--c2); }
.alarms p { margin: .35rem 0; font-size: 1.16rem; line-height: 1.45; font-weight: 560; text-wrap: pretty; }
.words { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.2rem; max-width: 56rem; }
.words dt { font-weight: 560; } .words dd { margin: 0; color: var(--quiet); }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
pre {
  margin: 0; overflow: auto; max-height: 34rem; font-size: .82rem; line-height: 1.55; tab-size: 2;
  font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.facts-table table { width: auto; min-width: min(24rem, 100%); }
.gallery { display: flex; flex-wrap: wrap; gap: 1rem; margin: .8rem 0 0; }
.gallery img { max-width: 100%; min-width: min(16rem, 100%); border-radius: 8px;
  border: 1px solid var(--rule); background: #fff; image-rendering: pixelated; }
.journal { margin: .5rem 0 0; padding-left: 1.1rem; }
footer { margin-top: 3rem; padding-top: 1.2rem; padding-bottom: 3rem; color: var(--quiet);
  font-size: .84rem; }
footer code { overflow-wrap: anywhere; }
@media (max-width: 60rem) { .cards { grid-template-columns: repeat(2, 1fr);
  } .parts > .half { grid-column: 1 / -1; } }
@media (max-width: 30rem) {
  header, main, footer { padding-left: 1rem; padding-right: 1rem; } header { padding-top: 2rem; }
  nav ul { padding-left: 1rem; padding-right: 1rem; }
  .words { grid-template-columns: 1fr; gap: .1rem; } .words dd { margin-bottom: .5rem; }
  .card { padding: .85rem .9rem; } .card .value { font-size: 1.35rem; } .story { font-size: 1.05rem; }
  figure, .panel { padding: 1rem .9rem .8rem; border-radius: 12px; }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
@media print {
  @page { margin: 14mm; }
  body { background: #fff; font-size: 10pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  header, main, footer { max-width: none; padding: 0; } header { padding-top: 0; } nav { display: none; }
  .cards { grid-template-columns: repeat(4, 1fr); } .card .value { font-size: 1.25rem; }
  .parts { display: block; } .parts > * { margin-bottom: 1rem; } .lead { break-after: avoid; }
  figure, .panel, .cards { box-shadow: none; break-inside: avoid; }
  .panel.long { break-inside: auto; }
  section { margin-top: 1.6rem; } h2, h3, figcaption { break-after: avoid; }
  .scroll, pre { max-height: none; overflow: visible; white-space: pre-wrap; }
  .scroll { white-space: normal; } details:not([open]) { display: none; }
}
"""

STYLE = (
    ":root { color-scheme: light;" + LIGHT + "}\n"
    '@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) { color-scheme: dark;'
    + DARK
    + "} }"
    + RULES
    + CHARTS
)

SCRIPT = """
"use strict";
// paper is white, whatever the screen was
addEventListener("beforeprint", () => {
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("details.printed").forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; });
"""

LEAF = (
    '<svg viewBox="0 0 24 24" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.8" '
    'stroke-linecap="round" stroke-linejoin="round"><path d="M12 21v-9"/>'
    '<path d="M12 12c0-5 3-8 8-8 0 5-3 8-8 8Z"/><path d="M12 16c0-3.6-2.4-6-7-6 0 3.8 2.6 6 7 6Z"/></svg>'
)


def _hash_script(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def build_page(title: str, kind: str, header: Markup, sections: Sequence[Section], footer: Markup) -> bytes:
    """A self-contained HTML page, UTF-8.

    kind: a word over the title. The page's policy lets exactly its own script run and nothing load
    from anywhere, so that text which slipped through unescaped could still do nothing.
    """
    policy = (
        f"default-src 'none'; script-src {_hash_script(SCRIPT)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in sections)
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · Perennial</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="brand">{LEAF}<span>{escape(kind)}</span></p>
<h1>{escape(title)}</h1>
{header}
</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
{"".join(section.markup() for section in sections)}
</main>
<footer>{footer}</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""
    # a lone surrogate, which JSON can carry and UTF-8 cannot, becomes a question mark
    return html.encode("utf-8", errors="replace")
