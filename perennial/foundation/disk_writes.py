"""Brings files to the disk beside what a process does next."""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from perennial.foundation.errors import StateError
from perennial.foundation.files import flush_folder


class DiskWrites:
    """Flushes files that were replaced without waiting; of one batch at a time.

    Until a batch is there, a power cut may leave its files damaged. A killed process leaves them whole.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failed: StateError | None = None

    def begin(self, paths: Sequence[Path]) -> None:
        """Flush files and their folders in a thread, in this order, once the batch before is there."""
        self.wait()
        self._thread = Thread(target=self._flush, args=(tuple(paths),), name="disk writes")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the batch is on the disk. Raises StateError naming a file that could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _flush(self, paths: Sequence[Path]) -> None:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                flush_folder(path.parent)
            except OSError as error:
                self._failed = StateError(f"{path}: could not be written ({error.strerror})")
                return
