"""The bytes and seconds that one request of any kind may take."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flwr.app import RecordDict

from perennial.foundation.errors import PolicyRefusal
from perennial.protocol.fields import read_kind, record_bytes

LARGEST = 2**30
"""Bytes of the tensors and texts of one request."""
LONGEST = 3600.0
"""Seconds of work for one request."""


def check_bytes(record: RecordDict) -> None:
    """Raises PolicyRefusal for a request that is larger than a site bears, before it is parsed."""
    found = record_bytes(record)
    if found > LARGEST:
        raise PolicyRefusal(f"largest request: {read_kind(record)}: found {found} bytes, allowed {LARGEST}")


TIME_RULE = "longest request"
"""What a refusal begins with that ended a request for its length."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises PolicyRefusal inside the block once seconds have passed.

    A site's process has one thread, where a signal stops the work; in any other thread the block ends first,
    and its result must not leave.
    """
    refusal = PolicyRefusal(f"{TIME_RULE}: the request took longer than {seconds:g} s")
    start = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        raise refusal

    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGALRM, stop)
        left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:
                # somebody else's alarm, at its own time
                signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - start)))
    else:
        yield
    if time.monotonic() - start > seconds:
        raise refusal
