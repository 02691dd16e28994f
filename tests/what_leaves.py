"""Writes docs/what_leaves_a_site.md from the messages: `python -m tests.what_leaves`."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from perennial.privacy.statement import describe_uncovered
from perennial.protocol import messages, secure_messages
from perennial.protocol.fields import WireMessage
from perennial.protocol.measurements import MEASUREMENTS
from perennial.protocol.messages import Refusal
from perennial.protocol.stamp import STAMP_FIELDS, Stamp

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

`python -m tests.what_leaves` writes this page from the types of the messages, and a test fails when the two
differ.

A site answers requests of a server, and of no one else. It sends nothing by itself. Each reply is one of
the messages below, and each side refuses a message with a field that is not listed. Images, rows of tables,
labels of single samples and file names are in none of them; without noise, though, a server that makes the
model can compute single samples from what leaves.

Every reply is built in one place at the site (`client/release.py`). A field has one of two types there:

- **Public**: it follows from the request, the approved experiment and `site.yaml`, whatever the data are.
- **Released**: it was computed from the data. A mechanism hides one unit in it (a sample, a patient or the
  whole site), and the site's ledger is charged before the reply is built. In a run with `privacy.mode:
  none` the mechanism is none at all: the value leaves as it is, and a deployed site's ledger notes an
  unprotected release.

A field without a type, a released field without noise in a private run, and a charge that the budget does
not cover have the same end: the site refuses, and nothing leaves. A site whose `policy.require_privacy`
demands a protection sends nothing without noise in any run.

The noise covers the values of released fields. It does not cover:

UNCOVERED
With an approved app, no code of the operator runs at the site ([threat model](threat_model.md)). What stays
there for a hospital to look after, and for how long, is in [data_protection.md](data_protection.md); what a
given epsilon means is in [privacy.md](privacy.md).

## Fields of replies

The stamp (run, experiment, order of classes, split key, task, round, number of classes) repeats the
request. It is public, and left out of the table. "Released, or public" is a field that tells a constant of
the settings in a private run, and a figure of the data in others.

"""


def page() -> str:
    """The page's text."""
    uncovered = "".join(f"- {words}.\n" for words in describe_uncovered())
    lines = ["| reply | field | type | what it is |", "| --- | --- | --- | --- |"]
    lines += [line for message in UP for line in _rows(message)]
    return HEAD.replace("UNCOVERED\n", f"{uncovered}\n") + "\n".join(lines) + "\n\n" + _measurements()


def _rows(message: type[WireMessage]) -> Iterator[str]:
    texts = _field_texts(message)
    stamp = STAMP_FIELDS if issubclass(message, Stamp) else ()
    for field in dataclasses.fields(message):  # pyright: ignore[reportArgumentType]
        if field.name not in stamp:
            public, counted = field.name in message.public, field.name in ("num_examples", "steps")
            kind = "released, or public" if counted else "public" if public else "released"
            if message is Refusal:
                kind = "public"
            yield f"| {message.__name__} | `{field.name}` | {kind} | {texts.get(field.name, '')} |"


def _measurements() -> str:
    lines = [
        "## Measurements",
        "",
        "`metrics` of a TrainReply: only what the strategy asks for; none in a private run.",
        "",
    ]
    lines += ["| name | type | what it is |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | number | {text} |" for name, text in MEASUREMENTS.items()]
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
