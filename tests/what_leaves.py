"""Writes docs/what_leaves_a_site.md from the messages: `python -m tests.what_leaves`."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from pathlib import Path

from perennial.privacy.exposure_table import ADVERSARIES, PROTECTIONS, TABLE
from perennial.protocol import messages, secure_messages
from perennial.protocol.fields import WireMessage
from perennial.protocol.measurements import MEASUREMENTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "what_leaves_a_site.md"
MESSAGES = [
    message
    for module in (messages, secure_messages)
    for message in vars(module).values()
    if getattr(message, "message_type", None) and message.__module__ == module.__name__
]
"""Every message, in the order of the files."""
DOWN = [message for message in MESSAGES if message.__name__.endswith(("Request", "Receipt"))]
UP = [message for message in MESSAGES if message not in DOWN]
HEAD = """# What leaves a site

After this page you can say what each message of a site holds, field by field.

`python -m tests.what_leaves` writes this page from the messages in `protocol/`; a test fails
when the two differ. Nothing else crosses the wire: each side refuses a message with a field that is not
listed here, and no other part of Perennial builds the records that travel. A site's own `site.yaml` decides
which requests it answers, and which protection must be on before anything leaves
([privacy.md](privacy.md)).
"""


IMAGES = """Under each protection that a policy can give a channel; in brackets the attack that shows it, or
that tried.
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD, "\n## From a site to the server\n"]
    parts += [_section(message) for message in UP]
    parts += [_measurements()]
    parts += [f"## Out of which channel single images come\n\n{IMAGES}\n{as_table()}"]
    parts += ["\n## From the server to a site\n"]
    parts += [_section(message) for message in DOWN]
    return "\n".join(parts)


def as_table() -> str:
    """The table as Markdown, for the documents."""
    lines = [
        f"| channel | protection | {' | '.join(ADVERSARIES)} |",
        f"| --- | --- |{' --- |' * len(ADVERSARIES)}",
    ]
    for cell in TABLE.values():
        verdicts = " | ".join(cell.verdict(adversary) for adversary in ADVERSARIES)
        lines.append(f"| {cell.channel} | {cell.protection} | {verdicts} |")
    meanings = [f"- {name}: {words}" for name, words in PROTECTIONS.items()]
    return "\n".join([*lines, "", *meanings]) + "\n"


def _measurements() -> str:
    lines = ["### What `metrics` of a TrainReply can hold", "", "Only what the strategy asks for.", ""]
    lines += ["| name | type | what it is |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | number | {text} |" for name, text in MEASUREMENTS.items()]
    return "\n".join(lines) + "\n"


def _section(message: type[WireMessage]) -> str:
    heading = [f"### {message.__name__}", "", inspect.getdoc(message) or "", ""]
    lines = [*heading, "| field | type | what it is |", "| --- | --- | --- |"]
    hints = typing.get_type_hints(message)
    documented = _field_texts(message)
    for field in dataclasses.fields(message):  # pyright: ignore[reportArgumentType]
        hint = (
            str(hints[field.name]) if not isinstance(hints[field.name], type) else hints[field.name].__name__
        )
        hint = hint.replace("perennial.protocol.tensors.", "").replace("|", "or")
        low, high = field.metadata.get("low"), field.metadata.get("high")
        bounds = f", {low} to {high}" if low is not None and high not in (None, float("inf")) else ""
        allowed = f", {field.metadata['allowed']}" if "allowed" in field.metadata else ""
        lines.append(f"| `{field.name}` | {hint}{bounds}{allowed} | {documented.get(field.name, '')} |")
    return "\n".join(lines) + "\n"


def _field_texts(message: type[WireMessage]) -> dict[str, str]:
    """The string under each field, of the class and of what it inherits from."""
    texts: dict[str, str] = {}
    for cls in reversed(message.__mro__):
        if not cls.__module__.startswith("perennial.protocol."):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


if __name__ == "__main__":
    PAGE.write_text(page())
