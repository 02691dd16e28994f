"""One self-contained page around the sections of a report, with a policy against injection."""

import base64
import hashlib
from collections.abc import Sequence

from perennial.server.report.markup import Markup, Section, escape
from perennial.server.report.style import SCRIPT, STYLE

LEAF = (
    '<svg viewBox="0 0 24 24" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.8" '
    'stroke-linecap="round" stroke-linejoin="round"><path d="M12 21v-9"/>'
    '<path d="M12 12c0-5 3-8 8-8 0 5-3 8-8 8Z"/><path d="M12 16c0-3.6-2.4-6-7-6 0 3.8 2.6 6 7 6Z"/></svg>'
)


def _allowed(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def page(title: str, kind: str, header: Markup, sections: Sequence[Section], footer: Markup) -> bytes:
    """A self-contained HTML page, UTF-8.

    kind: a word over the title. The page's policy lets exactly its own script run and nothing load
    from anywhere, so that text which slipped through unescaped could still do nothing.
    """
    policy = (
        f"default-src 'none'; script-src {_allowed(SCRIPT)}; style-src 'unsafe-inline'; "
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
