"""Warnings for a hospital about its own site, each with what to do about it."""

import time
from collections import Counter
from collections.abc import Iterator

from perennial.live.run_page import short_time
from perennial.live.site_state import HospitalState, left_in_words
from perennial.live.warnings import Warned
from perennial.server.report.markup import plural

DAY = 86_400.0
NEARLY = 0.8
"""Share of the lifetime budget that is spent when it counts as nearly spent."""


def warnings_of_site(state: HospitalState) -> Iterator[Warned]:
    """What the hospital has to decide or mend, the gravest first."""
    for problem in state.problems:
        yield Warned("problem", "critical", problem)
    if not state.alive:
        yield Warned(
            "supernode",
            "critical",
            "The SuperNode gives no sign of life.",
            "Look at its container or unit; perennial site check says what is wrong.",
        )
    if state.alive and not state.connected:
        silence = "" if state.answered is None else f" since {short_time(state.answered)}"
        why = state.obstacle or "From here it can be reached, and would let this site in."
        remedy = "" if state.obstacle else "Look at the SuperNode's log."
        text = f"The SuperLink has not answered this site's SuperNode{silence}. {why}"
        yield Warned("superlink", "warning", text, remedy)
    elif state.obstacle:
        yield Warned("superlink", "warning", state.obstacle)
    _, share = left_in_words(state.epsilon, state.limit)
    if state.limit is not None and share >= NEARLY:
        words = "is spent: requests are refused" if share >= 1 else "is nearly spent"
        remedy = "policy.max_epsilon of site.yaml is its limit."
        yield Warned("budget", "warning", f"The lifetime budget {words}.", remedy)
    if state.consent.paused:
        yield Warned("pause", "warning", f"Paused since {state.consent.paused}: every request is refused.")
    for offer in state.offered:
        yield Warned("offer", "warning", f"{offer.name} waits for a decision.", "It is listed on the page.")
    recent = [one for one in state.asked if one.ended in ("refused", "failed")][-200:]
    reasons = Counter(one.reason for one in recent if time.time() - one.began < DAY)
    for reason, count in reasons.most_common(5):
        text = f"{plural(count, 'request')} not answered in a day: {reason}"
        yield Warned("refused", "warning", text)
