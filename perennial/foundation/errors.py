"""Errors whose message is written for the person who reads it.

Each message names the file, key or site, what was found there and what is allowed. The command line
prints the message alone; anything that is not one of these is a fault of Perennial and keeps its traceback.
"""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class PerennialError(Exception):
    """Base of all errors that a person can act on."""


class ConfigError(PerennialError):
    """A YAML file or a command-line setting is wrong.

    The message names the file and the key, what was found and what is allowed.
    """


class DataError(PerennialError):
    """Data on disk cannot be used: names the file, row or class."""


class ProtocolError(PerennialError):
    """A message is malformed, stale or foreign: names the field."""


class PolicyRefusal(PerennialError):
    """The site's policy does not allow what was asked."""


class PrivacyError(PerennialError):
    """A privacy setting or combination would make a claim false, or a budget is spent."""


class StateError(PerennialError):
    """Durable state is missing, damaged, locked, or belongs to something else.

    Durable state is a run folder, a checkpoint, or a site's state_dir.
    """


class RecordGone(StateError):
    """A site no longer keeps what it knew at the round that the server asks for.

    The message names the record, the run and the rounds, and nothing of the site's data or disk.
    """


KINDS: dict[type[Exception], str] = {
    PolicyRefusal: "policy",
    PrivacyError: "privacy",
    DataError: "data",
    StateError: "state",
    RecordGone: "state",
    ProtocolError: "protocol",
    ConfigError: "config",
}
"""The first word of a refusal; `error` for any other."""
NOT_APPROVED = "this site has not approved the app of this run"
ERROR = "error at the site or on the way"
NO_ANSWER = "no answer within"
"""What the server knows of a site that sent no reply; a refusal begins with its kind."""
LONGEST_WORD = 100
REASON = 1_000
"""Characters of a reason that another side sent."""


def clean_text(text: str, longest: int = 200) -> str:
    """text on one line, without control characters, cut to a length that a person can read."""
    cut = text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut)


def suggest_nearest(found: str, allowed: Iterable[str]) -> str:
    """' (did you mean X?)' for a misspelt word, or '' when nothing is close.

    Nobody misspells a word of hundreds of characters, and comparing a stranger's would take minutes.
    """
    if len(found) > LONGEST_WORD:
        return ""
    close = get_close_matches(found, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def describe_failure(error: Exception, target: str) -> str:
    """The error's kind and text, after its line in somebody's own module. target: `module:Class`."""
    module = target.partition(":")[0].rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).stem == module]
    return f"{f'line {lines[-1]}, ' if lines else ''}{type(error).__name__}: {error}"
