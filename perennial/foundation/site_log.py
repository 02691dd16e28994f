"""A hospital's log: each thing said is one line, whatever another side put into it.

Settings keys, names and reasons come from a server, and a line break in one of them would be a line that the
site never wrote. The filter belongs to the logger, so that no call can forget it.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from perennial.foundation.errors import clean_text

LONGEST = 4_000
INDENT = "    | "
"""Before each line of a traceback, so that none of them looks like the beginning of a line of the log."""


_about: ContextVar[str] = ContextVar("about", default="")


def speak_of(**facts: object) -> None:
    """Begin each line that is logged from now on with these facts, such as site, run and round."""
    _about.set(clean_text(", ".join(f"{name} {fact}" for name, fact in facts.items()), LONGEST) + ": ")


@contextmanager
def limit_subject() -> Iterator[None]:
    """Context manager: at its end, drop the facts that speak_of() set inside."""
    before = _about.set("")
    try:
        yield
    finally:
        _about.reset(before)


class OneLine(logging.Filter):
    """A filter that makes a record's text printable, adds the facts of speak_of(), and indents tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: every record is kept."""
        record.msg, record.args = clean_text(_about.get() + record.getMessage(), LONGEST), ()
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
            record.exc_text = "\n".join(f"{INDENT}{clean_text(line, LONGEST)}" for line in lines)
        return True


log = logging.getLogger("perennial.site")
log.addFilter(OneLine())
