"""Says in words why a run does not go on, for the log, the terminal and the live page."""

from collections.abc import Mapping
from typing import Any

PAUSES = ("waiting", "waiting_for", "paused", "went_on", "stopped")
"""Events that pause_in_words puts into words."""


def pause_in_words(event: dict[str, Any]) -> str:
    """A sentence for an event that says that a run pauses, waits, or goes on."""
    missing = ", ".join(event.get("missing") or ())
    match event["event"]:
        case "waiting":
            there = ", ".join(event["connected"]) or "nobody"
            named = f"; not connected: {missing}" if missing else ""
            barred = "; ".join(f"{site}: {why}" for site, why in (event.get("refusing") or {}).items())
            no_part = f"; connected, and takes no part: {barred}" if barred else ""
            return f"waiting for {event['need']} sites; connected: {there}{named}{no_part}"
        case "waiting_for":
            return f"waiting for {waiting_in_words(event['sites'])}"
        case "paused":
            named = f"; not connected: {missing}" if missing else ""
            return f"paused: {event['reason']}{named}"
        case "went_on":
            came = ", ".join(event.get("came") or ())
            return f"goes on: {came} came back" if came else "goes on"
    return "stopped by the operator; the run can be resumed"


def waiting_in_words(sites: Mapping[str, int], shown: int = 5) -> str:
    """'linz (4 min), graz (2 min)': sites (site -> seconds) that a run waits for, the `shown` longest."""
    longest = sorted(sites.items(), key=lambda item: -item[1])
    words = [
        f"{site} ({f'{since} s' if since < 120 else f'{since // 60} min'})" for site, since in longest[:shown]
    ]
    more = f" and {len(sites) - shown} more" if len(sites) > shown else ""
    return ", ".join(words) + more
