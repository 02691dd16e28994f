"""Panels that many people watch: drawn once when something changes, and sent to every browser.

A slow browser gets the newest state and skips those in between, so that nothing has to be kept for it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

from perennial.server.report.markup import Markup

POLL = 0.03
"""Seconds between two looks at what is watched: two calls of stat()."""
REST = 0.1
"""Seconds after a drawing until the next: browsers keep up, and changes in between come together."""
KEEP_ALIVE = 10.0
"""Seconds after which a silent stream says that it is still there."""
RESTED = 30.0
"""Seconds for which a board that nobody watches goes on looking."""


class Board:
    """Draws the panels of one page again when something changed, and sends them to browsers as events.

    look: reads what happened, and returns whether panels must be drawn. draw: returns them by name. Both run
    in a thread of their own. every: seconds after which panels are drawn again although nothing happened.
    """

    def __init__(
        self, look: Callable[[], bool], draw: Callable[[], Mapping[str, Markup]], every: float = 2.0
    ) -> None:
        self.version = 0
        self.watchers = 0
        self._look, self._draw, self._every = look, draw, every
        self._panels: dict[str, tuple[int, Markup]] = {}
        self._changed = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._drawn = self._wanted = 0.0
        self._task: asyncio.Task[None] | None = None

    async def panels(self) -> dict[str, Markup]:
        """All panels by name, drawn anew if something changed."""
        self._wanted = time.monotonic()
        await self._refresh()
        return {name: content for name, (_, content) in self._panels.items()}

    async def stream(self, seen: int) -> AsyncIterator[str]:
        """Yield server-sent events with the panels newer than version `seen`, as long as somebody reads."""
        self.watchers += 1
        self._wanted = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        if seen > self.version:
            seen = 0  # of an earlier start of this server
        try:
            yield "retry: 1000\n\n"
            while True:
                changed = self._changed
                newer = {name: content for name, (version, content) in self._panels.items() if version > seen}
                if newer:
                    seen = self.version
                    yield f"id: {seen}\ndata: {json.dumps(newer)}\n\n"
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), KEEP_ALIVE)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.watchers -= 1
            self._wanted = time.monotonic()

    async def close(self) -> None:
        """Stop polling for changes."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while self.watchers or time.monotonic() - self._wanted < RESTED:
            await asyncio.sleep(REST if await self._refresh() else POLL)

    async def _refresh(self) -> bool:
        """Look, and draw where something changed; whether anything was drawn."""
        async with self._drawing:
            if not await asyncio.to_thread(self._look) and time.monotonic() - self._drawn < self._every:
                return False
            drawn = await asyncio.to_thread(self._draw)
            self._drawn = time.monotonic()
            newer = {
                name: content
                for name, content in drawn.items()
                if name not in self._panels or self._panels[name][1] != content
            }
            if newer:
                self.version += 1
                self._panels |= {name: (self.version, content) for name, content in newer.items()}
                self._changed.set()
                self._changed = asyncio.Event()
            return True
