"""Keeps track of the sites by name, while the node ids of their connections change.

In a deployment the operator's record says which name belongs to which key, and Flower which key a node has
proven; a node that says another name than its own takes no part, and is named in the journal.
Without a record, as in simulation, a node says its name once, when it first connects. Of two connected nodes
with one name the first keeps it. The second is a mistake, a lie, or the same site after a restart whose old
connection has not timed out yet: it rests, and is asked again as soon as the first is gone.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

import perennial
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.names import read_registered
from perennial.foundation.streams import stream
from perennial.protocol.messages import DescribeReply, DescribeRequest
from perennial.protocol.stamp import VERSION
from perennial.server.faults import WRONG_NAME
from perennial.server.journal import Journal
from perennial.strategies.round.exchange import Exchange, ask

if TYPE_CHECKING:
    from perennial.privacy.signed_sums import Signer

DESCRIBE_DEADLINE = 120.0
WAIT_POLL = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 15.0
"""Seconds until a node that rests is asked its name again, doubled each time."""


def build_sort_key(name: str) -> tuple[object, ...]:
    """A sort key under which site-2 comes before site-10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    )


@dataclass(frozen=True)
class _Resting:
    """A node that could not say its name, or said that of another; it is asked again later.

    ask_at: when, by the monotonic clock.
    behind: the node that has its name; 0 for none.
    """

    reason: str
    pause: float
    ask_at: float
    behind: int = 0

    def has_ended(self, now: float, online: set[int]) -> bool:
        return now >= self.ask_at or (self.behind != 0 and self.behind not in online)


class _NameTaken(ProtocolError):
    """Another connected node has this name. holder: that node."""

    def __init__(self, name: str, holder: int) -> None:
        super().__init__(f"site name {name!r} is already taken by connected node {holder}")
        self.holder = holder


class _WrongName(ProtocolError):
    """A node says a name that the operator's record gives to another, or to none."""


class Roster:
    """The connected sites by name. note: called once for each node that the operator should know of.

    record: the operator's file of nodes and names, read again for each new node; None: nodes name themselves.
    """

    def __init__(
        self, grid: Grid, experiment: str, note: Callable[[str], None], record: Path | None = None
    ) -> None:
        self._grid = grid
        self._experiment = experiment
        self._note = note
        self._record = record
        self._names: dict[int, str] = {}
        self._online: set[int] = set()
        self._turned_away: dict[int, str] = {}
        self.signers: dict[str, Signer] = {}
        """Of the sites that sign their sums: who they said they are."""
        self._resting: dict[int, _Resting] = {}

    @property
    def names(self) -> dict[int, str]:
        """Site name by node id, of every node that has said its name, connected or not."""
        return self._names

    def list_expected(self) -> list[str]:
        """All sites in the operator's record; [] without a record."""
        return (
            [] if self._record is None else sorted(read_registered(self._record).values(), key=build_sort_key)
        )

    def connected(self) -> dict[str, int]:
        """name -> node id of every usable site, in canonical order; asks new nodes for their names."""
        online = self._online = set(self._grid.get_node_ids())
        now = time.monotonic()
        resting = {node for node, rest in self._resting.items() if not rest.has_ended(now, online)}
        unknown = sorted(online - self._names.keys() - self._turned_away.keys() - resting)
        if unknown:
            self._describe(unknown, online)
        sites = {name: node for node, name in self._names.items() if node in online}
        return {name: sites[name] for name in sorted(sites, key=build_sort_key)}

    def list_barred(self) -> dict[str, str]:
        """site, or `node N` without a name -> why this connected node takes no part."""
        known = {} if self._record is None else read_registered(self._record)
        why = {node: rest.reason for node, rest in self._resting.items()} | self._turned_away
        named = {
            known.get(str(node), f"node {node}"): why[node] for node in sorted(why) if node in self._online
        }
        taking_part = {name for node, name in self._names.items() if node in self._online}
        return {name: reason for name, reason in named.items() if name not in taking_part}

    def wait(
        self, count: int, timeout: float, say: Callable[[list[str]], None] = lambda sites: None
    ) -> dict[str, int]:
        """Wait until at least `count` sites are connected, and return them as connected() does.

        say: called with the connected sites whenever they change, while they are too few.

        Raises StateError after timeout seconds, naming who is there.
        """
        deadline = time.monotonic() + timeout
        said: tuple[list[str], dict[str, str]] | None = None
        while len(sites := self.connected()) < count:
            if said != (list(sites), self.list_barred()):
                said = list(sites), self.list_barred()
                say(list(sites))
            if time.monotonic() >= deadline:
                resting = [f"; node {node}: {rest.reason}" for node, rest in self._resting.items()]
                raise StateError(
                    f"{len(sites)} of {count} sites connected after {timeout:.0f} s ({', '.join(sites)})"
                    f"{''.join(resting)}; start the missing sites and resume, or lower rounds.wait_for or "
                    "rounds.quorum"
                )
            time.sleep(WAIT_POLL)
        return sites

    def _describe(self, nodes: list[int], online: set[int]) -> None:
        request = DescribeRequest(version=VERSION, experiment=self._experiment)
        replies = ask(
            self._grid,
            Exchange(),
            [(str(node), node, request) for node in nodes],
            DescribeReply,
            DESCRIBE_DEADLINE,
            lambda node, reason: self._rest(int(node), reason),
        )
        # in the order of node ids, not of arrival, so that of two nodes with one name the same one wins every
        # time
        for node, reply in replies.items():
            try:
                self._admit(int(node), reply, online)
            except _NameTaken as taken:
                self._rest(int(node), str(taken), taken.holder)
            except _WrongName as wrong:
                # the operator may still write the record, and the site its file
                self._rest(int(node), str(wrong))
            except ProtocolError as error:
                self._turned_away[int(node)] = str(error)
                self._note(f"node {node}: takes no part: {error}")

    def _rest(self, node: int, reason: str, behind: int = 0) -> None:
        """Ask a node later again: its site may approve the app by then, or make room on its disk."""
        before = self._resting.get(node)
        if before is None or before.reason != reason:
            self._note(f"node {node}: takes no part: {reason}")
        pause = FIRST_PAUSE if before is None else min(2 * before.pause, LONGEST_PAUSE)
        self._resting[node] = _Resting(reason, pause, time.monotonic() + pause, behind)

    def _admit(self, node: int, reply: DescribeReply, online: set[int]) -> None:
        if reply.version != VERSION:
            raise ProtocolError(
                f"site {reply.site!r} speaks protocol version {reply.version}, this server (Perennial "
                f"{perennial.__version__}) {VERSION}: install the same release at both"
            )
        if reply.experiment != self._experiment:
            raise ProtocolError(
                f"site {reply.site!r} has experiment {reply.experiment:.12}, this run {self._experiment:.12}"
            )
        self._check_name(node, reply.site)
        for other, name in list(self._names.items()):
            if name == reply.site:
                if other in online:
                    raise _NameTaken(name, other)
                del self._names[other]
        self._names[node] = reply.site
        self._resting.pop(node, None)
        if reply.signing_key:
            from perennial.privacy.signed_sums import Signer

            self.signers[reply.site] = Signer(reply.site, reply.signing_key, reply.certified)

    def _check_name(self, node: int, said: str) -> None:
        """Raises _WrongName unless the operator's record has this name for the node's key."""
        if self._record is None:
            return
        known = read_registered(self._record).get(str(node))
        if known is None:
            raise _WrongName(f"{WRONG_NAME} {said!r}, and no registered site has its key")
        if known != said:
            raise _WrongName(f"{WRONG_NAME} {said!r}, but its key is that of site {known!r}")


FIRST_REST, LONGEST_REST = 30.0, 900.0
"""Seconds until a run that rests tries again although nobody new came, doubled each time."""
POLL = 0.5


class Attendance:
    """Decides which sites take part in a run, and waits for sites.

    waits_for_sites: whether sites may come back, so that waiting helps. look: called while the run waits; it
    may end the run.
    """

    def __init__(
        self,
        roster: Roster,
        experiment: Experiment,
        journal: Journal,
        waits_for_sites: bool,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.roster = roster
        self.waits_for_sites = waits_for_sites
        self._experiment = experiment
        self._journal = journal
        self._look = look
        self._rest = FIRST_REST

    def wait_for_all(self, expected: int) -> dict[str, int]:
        """Wait for the first sites; returns name -> node id. Raises StateError if too few connect in time."""
        rounds = self._experiment.rounds
        return self._wait(rounds.wait_for or expected)

    def list_declared_away(self, number: int) -> set[str]:
        """The sites that the experiment itself declares absent in round `number`."""
        return {
            gone.site
            for gone in self._experiment.absence
            if gone.first_round <= number <= (gone.last_round or number)
        }

    def is_short_by_plan(self, number: int) -> bool:
        """Whether sites declared absent, and nothing else, leave round `number` without a quorum."""
        there, quorum = set(self.roster.connected()), self._experiment.rounds.quorum
        return len(there) >= quorum > len(there - self.list_declared_away(number))

    def gather_available(self, number: int) -> dict[str, int]:
        """name -> node id of the connected sites that are not declared absent in round `number`.

        Waits for a quorum. Raises StateError if none comes and the run does not wait for sites.
        """
        away = self.list_declared_away(number)
        sites = self.roster.connected()
        while len(sites) < self._experiment.rounds.quorum:
            try:
                sites = self._wait(self._experiment.rounds.quorum)
            except StateError as error:
                if not self.waits_for_sites:
                    raise
                self.rest(str(error))
                sites = self.roster.connected()
        return {site: node for site, node in sites.items() if site not in away}

    def sample_sites(self, sites: dict[str, int], number: int, attempt: int = 0) -> dict[str, int]:
        """The share of the sites that round `number` asks, in canonical order.

        attempt: how often too few have answered before; each attempt draws anew, so that a site which refuses
        does not hold up the round for ever.
        """
        rounds = self._experiment.rounds
        if rounds.fraction == 1.0:
            return dict(sites)
        count = min(len(sites), max(rounds.quorum, round(rounds.fraction * len(sites))))
        names = list(sites)
        again = (attempt,) if attempt else ()
        generator = stream(self._experiment.seed, "client-sampling", number, *again)
        chosen = sorted(generator.choice(len(names), size=count, replace=False).tolist())
        return {names[index]: sites[names[index]] for index in chosen}

    def rest(self, reason: str, refusing: Mapping[str, str] | None = None) -> None:
        """Pause the run until a new site connects, or for a time that doubles at each rest.

        refusing: site -> why it refused, of connected sites that the run waits for.
        """
        before = set(self.roster.connected())
        why = self.roster.list_barred() | dict(refusing or {})
        self._journal.write("paused", reason=reason, missing=self.list_missing(before), refusing=why)
        until, self._rest = time.monotonic() + self._rest, min(2 * self._rest, LONGEST_REST)
        came: set[str] = set()
        while not came and time.monotonic() < until:
            self._look()
            time.sleep(POLL)
            there = set(self.roster.connected())
            came, before = there - before, there
        self._journal.write("went_on", came=sorted(came))

    def served(self) -> None:
        """Note that a round succeeded, so that the next rest is short again."""
        self._rest = FIRST_REST

    def list_missing(self, sites: Iterable[str]) -> list[str]:
        """Sites of the operator's record that are not connected. sites: those that are."""
        there = {*sites, *self.roster.list_barred()}
        return [name for name in self.roster.list_expected() if name not in there]

    def _wait(self, count: int) -> dict[str, int]:
        def say(sites: list[str]) -> None:
            self._look()
            facts = {
                "connected": sites,
                "missing": self.list_missing(sites),
                "refusing": self.roster.list_barred(),
            }
            self._journal.write("waiting", need=count, **facts)

        return self.roster.wait(count, self._experiment.rounds.join_seconds, say)
