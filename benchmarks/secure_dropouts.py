"""Every pattern of drop-outs of secure aggregation: `python -m perennial.benchmarks.secure_dropouts [SITES]`.

Each site falls silent before its masks are shared, its masked values, its vote or its opening, or never: 5^n
patterns for n sites, each by the state machines of both sides. A pattern must end in the sum of exactly the
sites that sent masked values, or in a named reason; and it must be opened whenever enough sites were there.
Beyond 5 sites patterns that differ by the sites' names alone are made once. Results:
results/secure_dropouts.json.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np

from perennial.benchmarks.environment import machine
from perennial.foundation.files import replace_file
from perennial.privacy.secure.keys import new_secret
from perennial.privacy.secure.masks import Words
from perennial.privacy.secure.parameters import Parameters
from perennial.privacy.secure.roster import Attempt, Peer, Subject
from perennial.privacy.secure.server_session import NotEnough, ServerSession
from perennial.privacy.secure.site_session import SiteSession

RESULTS = Path(__file__).with_name("results") / "secure_dropouts.json"
RUN = "0" * 16
PHASES = 4
BY_NAME_UP_TO = 5


class Sites:
    """n sites with keys of a task and one value each."""

    def __init__(self, count: int, parameters: Parameters) -> None:
        self.parameters = parameters
        self.names = [f"site-{index}" for index in range(count)]
        self.identity, self.cipher = ({name: new_secret() for name in self.names} for _ in range(2))
        self.peers = [
            Peer.introduce(name, self.identity[name], self.cipher[name], RUN, 1) for name in self.names
        ]
        generator = np.random.Generator(np.random.PCG64(count))
        self.values = {name: generator.integers(0, 2**32, 3, dtype=np.uint32) for name in self.names}

    def outcome(self, falls: tuple[int, ...], number: int) -> str:
        """How the pattern ends: "opened", or the reason.

        Raises AssertionError on a wrong sum, and when a sum that could be opened was not.
        """
        here = [{n for n, at in zip(self.names, falls, strict=True) if at > phase} for phase in range(PHASES)]
        try:
            total, survivors = self._attempt(here, number)
        except NotEnough as missing:
            threshold = self.parameters.threshold(len(self.names))
            enough = len(here[1]) >= max(threshold, self.parameters.survivors_needed(len(here[0])))
            assert not (enough and len(here[3]) >= threshold), (falls, missing)
            return _without_numbers(str(missing))
        assert set(survivors) == here[1], falls
        expected = sum((self.values[name] for name in survivors), np.zeros(3, np.uint32))
        assert np.array_equal(total, expected), falls
        return "opened"

    def _attempt(self, here: list[set[str]], number: int) -> tuple[Words, list[str]]:
        attempt, subject = Attempt(RUN, 1, number), Subject(number, "update", f"{number:064x}")
        sessions = {
            name: SiteSession.prepare(
                name,
                attempt,
                self.parameters,
                self.peers,
                self.cipher[name],
                self.identity[name],
                lambda *_: None,
            )
            for name in self.names
            if name in here[0]
        }
        server = ServerSession(attempt, self.parameters, self.peers, subject)
        server.enrol({name: session.advert for name, session in sessions.items()}, self.names)
        for member in server.members:
            if member.name in here[1]:
                words = self.values[member.name].copy()
                sessions[member.name].enrol(subject, server.members)
                sessions[member.name].mask(words)
                server.add(member.name, words)
        server.close()
        for name in server.survivors:
            if name in here[2]:
                keys = self.cipher[name], self.identity[name]
                server.add_vote(name, sessions[name].sign(server.survivors, server.shares_for(name), *keys))
        server.require_votes()
        for name in server.survivors:
            if name in here[3]:
                server.add_opening(name, sessions[name].open(server.survivors, server.votes))
        return server.open(), server.survivors


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
            federation = Sites(sites, parameters)
            ends = Counter(federation.outcome(falls, n) for n, falls in enumerate(patterns(sites), start=1))
            line = {"sites": sites, "colluders": colluders, "patterns": ends.total(), "ends": dict(ends)}
            print(json.dumps(line), flush=True)
            found.append(line)
    text = json.dumps({"machine": machine(), "wrong_sums": 0, "runs": found}, indent=1)
    replace_file(RESULTS, (text + "\n").encode(), 0o644)


if __name__ == "__main__":
    main()
