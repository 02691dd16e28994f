"""Every pattern of drop-outs of secure aggregation: `python -m benchmarks.secure_dropouts [SITES]`.

Each site falls silent before its masks are shared, its masked values, its vote or its opening, or never: 5^n
patterns for n sites, each by the state machines of both sides. A pattern must end in the sum of exactly the
sites that sent masked values, or in a named reason; and it must be opened whenever enough sites were there.
Beyond 5 sites patterns that differ by the sites' names alone are
made once. Results: results/secure_dropouts.json.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np

from benchmarks.environment import machine
from benchmarks.secure_sites import MaskedFederation, random_values, run_attempt
from perennial.foundation.files import replace_file
from perennial.privacy.secure.parameters import Parameters

RESULTS = Path(__file__).with_name("results") / "secure_dropouts.json"
PHASES = 4
BY_NAME_UP_TO = 5


class Patterns:
    """n sites with keys of a task and one value each, and how patterns of drop-outs end among them."""

    def __init__(self, count: int, parameters: Parameters) -> None:
        self.parameters = parameters
        self.federation = MaskedFederation(count, parameters)
        self.names = self.federation.names
        self.values = random_values(self.names, 3, np.uint32, seed=count)

    def outcome(self, falls: tuple[int, ...], number: int) -> str:
        """How the pattern ends: "opened", or the reason.

        Raises AssertionError on a wrong sum, and when a sum that could be opened was not.
        """
        here = [{n for n, at in zip(self.names, falls, strict=True) if at > phase} for phase in range(PHASES)]
        found = run_attempt(self.federation, self.values, number, here)
        if isinstance(found, str):
            threshold = self.parameters.threshold(len(self.names))
            enough = len(here[1]) >= max(threshold, self.parameters.survivors_needed(len(here[0])))
            assert not (enough and len(here[3]) >= threshold), (falls, found)
            return _without_numbers(found)
        total, survivors = found
        assert set(survivors) == here[1], falls
        expected = sum((self.values[name] for name in survivors), np.zeros(3, np.uint32))
        assert np.array_equal(total, expected), falls
        return "opened"


def patterns(sites: int) -> Iterator[tuple[int, ...]]:
    """The phase in which each site falls silent; PHASES: never."""
    phases = range(PHASES + 1)
    if sites <= BY_NAME_UP_TO:
        yield from product(phases, repeat=sites)
    else:
        yield from combinations_with_replacement(phases, sites)


def _without_numbers(text: str) -> str:
    words = [word for word in text.split() if not word[0].isdigit() and not word.startswith("'")]
    return " ".join(words)


def main() -> None:
    """All patterns for 2 to 7 sites, or for the numbers of sites on the command line."""
    counts = [int(count) for count in sys.argv[1:]] or [2, 3, 4, 5, 6, 7]
    found = []
    for sites in counts:
        for colluders in range(max(1, sites - 2)):
            parameters = Parameters(colluders)
            if parameters.survivors_needed(sites) > sites:
                continue
            all_patterns = Patterns(sites, parameters)
            ends = Counter(all_patterns.outcome(falls, n) for n, falls in enumerate(patterns(sites), start=1))
            line = {"sites": sites, "colluders": colluders, "patterns": ends.total(), "ends": dict(ends)}
            print(json.dumps(line), flush=True)
            found.append(line)
    text = json.dumps({"machine": machine(), "wrong_sums": 0, "runs": found}, indent=1)
    replace_file(RESULTS, (text + "\n").encode(), 0o644)


if __name__ == "__main__":
    main()
