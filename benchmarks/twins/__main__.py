"""Runs twins: `python -m benchmarks.twins`.

It runs every case, plants the leaks, and writes results/twins.json and .md. A case that stands in the file
already is not run again; `--afresh` runs all. `--list` prints what shows without
a charge. `--only WORD` runs the cases with that word in their name and writes nothing. Ends with 1 where
something differs that neither a charge nor the list covers.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.environment import versions
from benchmarks.twins.cases import Case, cases
from benchmarks.twins.leaks import LEAKS
from benchmarks.twins.page import RESULTS, page
from benchmarks.twins.rows import row, rows_of
from benchmarks.twins.trial import trials
from perennial.foundation.files import replace_file
from perennial.privacy.covered import uncovered_in_words


def sampled(seed: int, count: int) -> list[Case]:
    """So many cases, by a seed."""
    return random.Random(seed).sample(cases(), count)


def leaks() -> list[dict[str, Any]]:
    """Each planted leak, and what was objected to."""
    found = []
    for name, (leak, case) in LEAKS.items():
        objections = {(trial.pair, said) for trial in trials(case, leak()) for said in trial.objections}
        paths = sorted({_field(said) for _, said in objections})
        found.append(
            {
                "leak": name,
                "case": case.name,
                "pairs": sorted({pair for pair, _ in objections}),
                "paths": paths,
            }
        )
    return found


def _field(said: str) -> str:
    path = said.partition(":")[0]
    return path if path.startswith("operator") else path.partition("/")[0]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.twins")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--afresh", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"- {words}" for words in uncovered_in_words()))
        return 0
    if asked.only:
        found = [row(trial) for case in cases() if asked.only in case.name for trial in trials(case)]
        _tell(found)
        print(f"{len(found)} pairs, {sum(len(each['objections']) for each in found)} objections")
        return int(any(each["objections"] for each in found))
    file = RESULTS.with_suffix(".json")
    content: dict[str, Any] = {"rows": [], "leaks": []}
    if file.exists() and not asked.afresh:
        content = json.loads(file.read_text())
    content["versions"] = versions()
    names = [case.name for case in cases()]
    content["rows"] = [each for each in content["rows"] if each["case"] in names]
    content["leaks"] = content["leaks"] or leaks()
    there = {each["case"] for each in content["rows"]}
    content["left"] = sorted(set(names) - there)
    with ProcessPoolExecutor(asked.workers, get_context("spawn")) as pool:
        for name, found in pool.map(rows_of, [name for name in names if name not in there]):
            _tell(found)
            content["rows"] += found
            if found:
                content["left"].remove(name)
            replace_file(file, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), page(content).encode(), mode=0o644)
    return int(bool(content["left"]) or any(each["objections"] for each in content["rows"]))


def _tell(rows: Iterable[dict[str, Any]]) -> None:
    for each in rows:
        for said in each["objections"]:
            print(f"{each['case']}, {each['pair']} ({each['way']}): {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
