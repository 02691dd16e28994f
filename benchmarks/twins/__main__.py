"""`python -m perennial.benchmarks.twins` runs every case, plants the leaks, and writes results/twins.json and .md.

`--list` prints what shows without a charge. `--only WORD` runs the cases with that word in their name and
writes nothing. Ends with 1 where something differs that neither a charge nor the list covers.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from typing import Any

from perennial.benchmarks.environment import versions
from perennial.benchmarks.twins.cases import Case, cases
from perennial.benchmarks.twins.leaks import LEAKS
from perennial.benchmarks.twins.page import RESULTS, page
from perennial.benchmarks.twins.trial import Trial, trials
from perennial.foundation.files import replace_file
from perennial.privacy.covered import uncovered_in_words


def sampled(seed: int, count: int) -> list[Case]:
    """So many cases, by a seed."""
    return random.Random(seed).sample(cases(), count)


def row(trial: Trial) -> dict[str, Any]:
    """A trial as it is written down."""
    return {
        "case": trial.case,
        "mode": trial.mode,
        "pair": trial.pair,
        "way": trial.way,
        "messages": trial.messages,
        "requests": sorted(trial.requests),
        "charges": sorted(trial.charges),
        "refused": len(trial.refused),
        "covered": sorted({one.path.split("/")[0] for one in trial.differences if one.covered}),
        "listed": sorted({one.listed for one in trial.differences if one.listed}),
        "moved": [max(found) for found in _shares(trial)],
        "objections": trial.objections,
    }


def _shares(trial: Trial) -> Iterable[list[float]]:
    shares = [one.moved / one.bound for one in trial.differences if one.moved is not None and one.bound]
    return [shares] if shares else []


def leaks() -> list[dict[str, Any]]:
    """Each planted leak, and what was objected to."""
    found = []
    for name, (leak, case) in LEAKS.items():
        objections = {(trial.pair, said) for trial in trials(case, leak()) for said in trial.objections}
        paths = sorted({said.split(":")[0].split("/")[0] for _, said in objections})
        found.append({"leak": name, "case": case.name, "pairs": sorted({pair for pair, _ in objections}), "paths": paths})
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m perennial.benchmarks.twins")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"- {words}" for words in uncovered_in_words()))
        return 0
    rows: list[dict[str, Any]] = []
    for case in cases():
        if asked.only in case.name:
            for trial in trials(case):
                rows.append(row(trial))
                for said in trial.objections:
                    print(f"{trial.case}, {trial.pair} ({trial.way}): {said}", flush=True)
    if asked.only:
        print(f"{len(rows)} pairs, {sum(len(each['objections']) for each in rows)} objections")
    else:
        content = {"versions": versions(), "rows": rows, "leaks": leaks()}
        replace_file(RESULTS.with_suffix(".json"), (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
        replace_file(RESULTS.with_suffix(".md"), page(content).encode(), mode=0o644)
    return int(any(each["objections"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
