"""The operator's pages as somebody sees them who leaves them open: what they say is wrong, and when."""

import html
import json
import re
import threading
import time
import urllib.request
from dataclasses import dataclass

WARNING = re.compile(r'<li class="(?:critical|warning)"><strong>(.*?)</strong> (.*?)(?: <span>.*?)?</li>')
SITE = re.compile(r'<tr><t[hd][^>]*>([^<]+)</t[hd]><td[^>]*><span class="pill (\w+)">')
EVENTS = re.compile(r'data-events="([^"]+)"')
TROUBLE = ("refused", "failed", "silent", "offline")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Said:
    """One thing that a page says is wrong. text, remedy: as a person reads them; numbers in them may grow."""

    text: str
    remedy: str = ""

    @property
    def cause(self) -> str:
        """The same words while the cause lasts."""
        return re.sub(r"(\d[\d.,]*\s*(s|min|h|GB|days?)?\s*)+", "#", self.text)


@dataclass(frozen=True)
class Seen:
    """Something that a page began to say. seconds: after the disturbance."""

    seconds: float
    said: Said


class WatchedPage:
    """One page, followed by its events as a browser does until close()."""

    def __init__(self, address: str, path: str) -> None:
        self._address, self._path = address, path
        self._history: list[tuple[float, list[Said]]] = []
        self._closed = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def now(self) -> list[Said]:
        """What it says is wrong."""
        return self._history[-1][1] if self._history else []

    def new_since(self, moment: float) -> list[Seen]:
        """What it has said since a moment (time.monotonic) and did not say then, in order."""
        history = list(self._history)
        known = {said.cause for said in next((found for at, found in reversed(history) if at <= moment), [])}
        seen: list[Seen] = []
        for at, found in history:
            for said in found if at > moment else ():
                if said.cause not in known:
                    known.add(said.cause)
                    seen.append(Seen(at - moment, said))
        return seen

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                with urllib.request.urlopen(self._address + self._path, timeout=30) as page:
                    text = page.read().decode()
                events = EVENTS.search(text)
                assert events is not None
                # from version 0 on, the first event has every panel
                stream_of = re.sub(r"v=\d+", "v=0", html.unescape(events[1]))
                panels: dict[str, str] = {}
                with urllib.request.urlopen(self._address + stream_of, timeout=60) as stream:
                    for line in stream:
                        if line.startswith(b"data: "):
                            panels |= json.loads(line[6:])
                            self._take(panels)
                        if self._closed.is_set():
                            return
            except OSError:
                pass  # no such run yet, or the pages start again
            time.sleep(POLL_SECONDS)

    def _take(self, panels: dict[str, str]) -> None:
        text = "".join(panels.values())
        found = [Said(*map(html.unescape, warning)) for warning in WARNING.findall(text)]
        found += [Said(f"{site}: {state}") for site, state in SITE.findall(text) if state in TROUBLE]
        self._history.append((time.monotonic(), found))
