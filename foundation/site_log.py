"""A hospital's log: each thing said is one line, whatever another side put into it.

Settings keys, names and reasons come from a server, and a line break in one of them would be a line that the
site never wrote. The filter belongs to the logger, so that no call can forget it.
"""

import logging
import traceback

from perennial.foundation.errors import shown

LONGEST = 4_000
INDENT = "    | "
"""Before each line of a traceback, so that none of them looks like the beginning of a line of the log."""


class OneLine(logging.Filter):
    """Makes a record's text printable, and indents its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: every record is kept."""
        record.msg, record.args = shown(record.getMessage(), LONGEST), ()
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
            record.exc_text = "\n".join(f"{INDENT}{shown(line, LONGEST)}" for line in lines)
        return True


log = logging.getLogger("perennial.site")
log.addFilter(OneLine())
