"""A server that writes lines of its own into a hospital's log, by line breaks and colour codes."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from perennial.client.activity import ACTIVITY
from perennial.foundation.errors import clean_text
from perennial.foundation.site_log import INDENT, log
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import POLICIES, Hospital

FORGED = "x\nINFO:  approved by Dr. Huber\r\x1b[2K\x1b[32mall is well\u2028\u202e\x07"


class Lines(logging.Handler):
    """What a handler with a plain format would write."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self.written = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.written += self.format(record) + "\n"


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def genuine(written: str) -> bool:
    """Whether each line is one that the site began, and every character can be printed."""
    return all(
        line.isprintable() and line.startswith(("WARNING: ", "ERROR: ", INDENT))
        for line in written.split("\n")[:-1]
    )


def test_a_settings_key_forges_no_line_of_the_log(tmp_path: Path, lines: Lines) -> None:
    hospital = Hospital(tmp_path, POLICIES["open"])
    settings = json.dumps({FORGED: 1})
    hospital.ask(TrainRequest(**hospital.stamp(), arrays=Tensors(hospital.arrays()), settings=settings))
    assert "all is well" in lines.written, "the reason is logged"
    name = hospital.config.site
    assert lines.written.startswith(f"WARNING: site {name}, run "), "and whom and what it is about"
    assert genuine(lines.written)
    assert "all is well" in hospital.refusal and hospital.refusal.isprintable()
    noted = [json.loads(line) for line in (hospital.config.state_dir / ACTIVITY).read_text().splitlines()]
    assert all(str(value).isprintable() for event in noted for value in event.values())


def test_a_fault_with_a_forged_message_forges_none_either(lines: Lines) -> None:
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        log.exception("failed while asked for %s", FORGED)
    assert "Traceback" in lines.written and "RuntimeError" in lines.written
    assert genuine(lines.written)


@pytest.mark.parametrize(
    "name", ["perennial.client.app", "perennial.strategies.analytic.site", "perennial.learning.steps"]
)
def test_every_module_of_a_site_writes_through_the_one_log(name: str) -> None:
    module = __import__(name, fromlist=["log"])
    assert module.log is log and log.filters


@pytest.mark.parametrize("longest", [3, 200])
def test_what_is_shown_is_one_printable_line(longest: int) -> None:
    found = clean_text(FORGED, longest)
    assert found.isprintable() and len(found) <= longest + len(f"... ({len(FORGED)} characters)")
