"""The results of twin runs as Markdown."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from perennial.privacy.covered import uncovered_in_words

RESULTS = Path(__file__).parents[1] / "results" / "twins"


def page(content: dict[str, Any]) -> str:
    """The whole page."""
    rows = content["rows"]
    used = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    messages = sum(row["messages"] for row in rows)
    lines = [
        "# Twin runs",
        "",
        f"`python -m benchmarks.twins`; {used}.",
        "Two copies of one site, which differ in one record, got the same requests; every field of every",
        "message, the operator's files and the site's log were compared.",
        f"{len({row['case'] for row in rows})} cases, {len(rows)} pairs, {messages} answered messages;",
        f"objections: {sum(len(row['objections']) for row in rows)}. Experiments are slices: four classes,",
        "two tasks, 8 x 8 pixels or 5 columns, narrow networks, one step of DP-SGD in a round, random maps",
        "in the place of pretrained ones. `moved`: the largest difference of a protected release, as a share",
        f"of what is charged. Cases not run: {', '.join(content.get('left') or []) or 'none'}.",
        "",
        "| case | mode | pairs | messages | charges | largest moved | refusals | objections |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_case: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_case[row["case"]].append(row)
    for name, group in by_case.items():
        moved = [share for row in group for share in row["moved"]]
        charges = sorted({charge for row in group for charge in row["charges"]})
        lines.append(
            f"| {name} | {group[0]['mode']} | {len(group)} | {sum(row['messages'] for row in group)} | "
            f"{', '.join(charges) or '-'} | {f'{max(moved):.3f}' if moved else '-'} | "
            f"{sum(row['refused'] > 0 for row in group)} | {sum(len(row['objections']) for row in group)} |"
        )
    lines += [
        "",
        "## What was covered",
        "",
        "| request | trials | | pair | trials |",
        "| --- | --- | --- | --- | --- |",
    ]
    requests = Counter(kind for row in rows for kind in row["requests"])
    pairs = Counter(row["pair"] for row in rows)
    left, right = sorted(requests.items()), sorted(pairs.items())
    for place in range(max(len(left), len(right))):
        one = left[place] if place < len(left) else ("", "")
        other = right[place] if place < len(right) else ("", "")
        lines.append(f"| {one[0]} | {one[1]} | | {other[0]} | {other[1]} |")
    lines += [
        "",
        "## What shows without a charge",
        "",
        "| what | trials in which it differed |",
        "| --- | --- |",
    ]
    seen = Counter(words for row in rows for words in row["listed"])
    lines += [f"| {words} | {seen[words] or 'not compared'} |" for words in uncovered_in_words()]
    lines += [
        "",
        "## Planted leaks",
        "",
        "| leak | in case | found at | by pairs |",
        "| --- | --- | --- | --- |",
    ]
    for leak in content["leaks"]:
        where = ", ".join(leak["paths"]) or "NOT FOUND"
        lines.append(f"| {leak['leak']} | {leak['case']} | {where} | {', '.join(leak['pairs'])} |")
    objected = [
        f"- {row['case']}, {row['pair']} ({row['way']}): {said}" for row in rows for said in row["objections"]
    ]
    if content.get("open"):
        lines += ["", "## Not explained yet", ""]
        lines += [f"- {case}: {said}" for case, said in content["open"].items()]
    if objected:
        lines += ["", "## Objections", "", *objected]
    return "\n".join(lines) + "\n"
