"""The page of the mutation campaign: the share of mutants that the tests notice, and each survivor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.mutants import ROOMS

NOT_LOOKED_AT = "not yet looked at"


@dataclass(frozen=True)
class Tried:
    """One mutant.

    first: its latest result by the tests as they were when the campaign began.
    last: its latest result, which differs where tests were added for survivors.
    reason: what a person found out about a survivor or a mutant that hangs; '' where nobody has looked.
    """

    first: Mapping[str, Any]
    last: Mapping[str, Any]
    reason: str = ""

    def noticed(self, result: Mapping[str, Any]) -> bool:
        """Whether a test failed; a mutant that hangs counts only once somebody has said why it hangs."""
        return result["how"] == "failed" or (result["how"] == "hung" and bool(self.reason))


def tried(lines: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> list[Tried]:
    """The mutants of a campaign. lines: all results, in the order in which they came."""
    first: dict[str, Mapping[str, Any]] = {}
    last: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if not line.get("added", False):
            first[line["key"]] = line
        last[line["key"]] = line
    return [Tried(first[key], last[key], reasons.get(key, "")) for key in sorted(last)]


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share.

    Wilson 1927 (doi 10.1080/01621459.1927.10502953).
    """
    share = successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return middle - half, middle + half


def page(found: Sequence[Tried], wanted: int, made: str) -> str:
    """Markdown: the share by room, and each survivor with what is known of it.

    wanted: mutants of the whole sample.
    made: what the campaign was made of, and where, in a sentence.
    """
    lines = ["# Do the tests notice?", ""]
    if len(found) < wanted:
        lines += [
            f"**Not finished: {len(found)} of {wanted} mutants have been tried.** Their order is random,",
            "so those that were tried are a random sample too, only a smaller one.",
            "",
        ]
    lines += [
        "Each mutant is a small change by Cosmic Ray at one position of `learning/`, `strategies/`,",
        "`privacy/` or `data/`; the positions are a seeded sample, stratified by file. A mutant meets the",
        "fast tests that run its line, those first that run little else, until one fails, which is called",
        "noticed; *met* below says how many it met. `python -m benchmarks.mutation` made this",
        f"page; `mutation.jsonl` has a line for each result. {made}",
        "",
        "| room | mutants | noticed at first | noticed now | share now | 95 % interval (Wilson) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for room in (*ROOMS, "all"):
        of_room = [one for one in found if room in ("all", one.last["file"].split("/")[0])]
        if of_room:
            first, now = (
                sum(one.noticed(result) for one, result in zip(of_room, results, strict=True))
                for results in ([one.first for one in of_room], [one.last for one in of_room])
            )
            low, high = wilson(now, len(of_room))
            share = f"{now / len(of_room):.1%} | {low:.1%} to {high:.1%}"
            lines.append(f"| {room} | {len(of_room)} | {first} | {now} | {share} |")
    lines += ["", "*At first* is before anybody had looked at a survivor; *now* is with the tests that were"]
    lines += [
        "written for some of them. A mutant that cannot be noticed, because the program does the same with"
    ]
    lines += ["it, counts as not noticed all the same."]
    others = [one for one in found if one.noticed(one.last) or not one.reason.startswith("equivalent")]
    if len(others) < len(found):
        now = sum(one.noticed(one.last) for one in others)
        low, high = wilson(now, len(others))
        lines += [
            f"Without the {len(found) - len(others)} that are said to be equivalent below, the tests notice "
            f"{now} of {len(others)}, {now / len(others):.1%} ({low:.1%} to {high:.1%})."
        ]
    lines += _listed("Noticed by a test that was written for it", found, _repaired)
    lines += _listed("Survivors", found, lambda one: one.last["how"] in ("survived", "uncovered"))
    lines += _listed("Mutants that hang", found, lambda one: one.last["how"] == "hung")
    return "\n".join(lines) + "\n"


def _repaired(one: Tried) -> bool:
    return one.noticed(one.last) and not one.noticed(one.first)


def _listed(title: str, found: Sequence[Tried], chosen: Any) -> list[str]:
    rows = [
        f"| `{one.last['key']}` | {one.last['met']} of {one.last['tests']} | {_about(one)} |"
        for one in found
        if chosen(one)
    ]
    return (
        ["", f"## {title}", "", "| change | met | what it is |", "| --- | --- | --- |", *rows] if rows else []
    )


def _about(one: Tried) -> str:
    return f"noticed by `{one.last['by']}`" if one.last["how"] == "failed" else one.reason or NOT_LOOKED_AT
