"""The progress of a ring's round, hop by hop, so that a stopped server goes on at the next hop.

A round of a ring can take hours, and every turn is work, and under privacy a release, of a site.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp import Grid
from safetensors import SafetensorError, safe_open
from torch import Tensor

from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.tensor_file import yield_pieces
from perennial.learning.scored import Worth
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import hash_tensors
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted, Gate
from perennial.strategies.round.request import Arrays, RoundRequest

FILE = "ring.safetensors"
SAVE_EVERY = 1.0
"""Seconds of work that a stop may cost; hops of a simulation are shorter, and do not wait for the disk."""

KEPT = ("norm", "num_examples", "train_loss", "steps", "notes", "scaled", "capped")
"""What a hop keeps of the reply that was taken."""


@dataclass(frozen=True)
class Hop:
    """One site's turn in a ring's round.

    kind: taken into the model or why not. received, sent: bytes. notes, scaled, capped: what bounds changed.
    facts: added by observers.
    """

    site: str
    sweep: int
    kind: Literal["taken", "dropped", "refused", "absent"]
    reason: str = ""
    norm: float = 0.0
    num_examples: int = 0
    train_loss: float | None = None
    steps: int = 0
    received: int = 0
    sent: int = 0
    notes: Sequence[str] = ()
    scaled: bool = False
    capped: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reply: Admitted, sweep: int, received: int, sent: int, facts: dict[str, Any]) -> "Hop":
        """The hop of a reply that was taken."""
        told = {name: getattr(reply, name) for name in KEPT}
        return cls(reply.site, sweep, "taken", received=received, sent=sent, facts=facts, **told)

    @property
    def reply(self) -> Admitted:
        """The reply that was taken, without its tensors."""
        return Admitted(self.site, {}, self.norm, self.num_examples, self.train_loss, self.steps)


@dataclass
class RingLog:
    """The progress of a ring's round, kept on disk.

    route: sites by sweep, in order. arrays: the model that goes on.
    worth: of that model; None if it was not measured. folder: None keeps nothing on disk.
    """

    folder: Path | None
    key: str
    arrays: Mapping[str, Tensor]
    route: list[list[str]] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    worth: Worth | None = None
    _saved: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path | None, stamp: Stamp, arrays: Mapping[str, Tensor]) -> "RingLog":
        """The log of this round from this model: the one on disk, or a new one.

        A damaged file, or one of another round or model, costs the hops that it holds and nothing else.
        """
        key = json.dumps([stamp.stamp_fields, hash_tensors(arrays)], sort_keys=True)
        log = cls(folder, key, arrays)
        path = log.path
        if path is not None and path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    facts = json.loads((file.metadata() or {})["log"])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, KeyError, ValueError):
                return log
            if facts["key"] == key:
                log.route, log.hops = facts["route"], [Hop(**hop) for hop in facts["hops"]]
                log.worth = facts["worth"]
                log.arrays = {name: tensors[name].to(old.device) for name, old in arrays.items()}
        return log

    def add(self, hop: Hop) -> None:
        """Append a hop; writes the log to disk if the last time was SAVE_EVERY seconds ago."""
        self.hops.append(hop)
        if time.monotonic() - self._saved >= SAVE_EVERY and self.path is not None:
            self._save(self.path)
            self._saved = time.monotonic()

    @property
    def last_sweep(self) -> int:
        """The sweep in which the model was last trained; 0 before the first turn."""
        return max((hop.sweep for hop in self.hops if hop.kind == "taken"), default=0)

    def begin_anew(self, arrays: Mapping[str, Tensor], reason: str) -> None:
        """Mark all turns as dropped for this reason, and go back to the round's first model, `arrays`."""
        self.hops = [replace(hop, kind="dropped", reason=reason) for hop in self.hops]
        self.arrays, self.worth = arrays, None

    def has_trained(self, site: str) -> bool:
        """Whether the site took a turn in this round."""
        return any(hop.site == site and hop.kind == "taken" for hop in self.hops)

    def build_outcome(self, asked: Sequence[str] | Mapping[str, int]) -> RoundOutcome:
        """The round's outcome, with each site's turns joined. asked: the round's sites."""
        taken = [hop for hop in self.hops if hop.kind == "taken"]
        return RoundOutcome(
            participants={site: _join_hops(site, taken) for site in asked if self.has_trained(site)},
            dropped=self._list_reasons("dropped"),
            refused=self._list_reasons("refused"),
            absent=[site for site in asked if all(h.kind == "absent" for h in self.hops if h.site == site)],
            bytes_up=sum(hop.received for hop in taken),
            bytes_down=sum(hop.sent for hop in taken),
            warnings=[f"site {hop.site}: {note}" for hop in taken for note in hop.notes],
            details={
                "order": self.route,
                "turns": [
                    {"site": hop.site, "sweep": hop.sweep, "kind": hop.kind, **hop.facts} for hop in self.hops
                ],
            },
        )

    def _list_reasons(self, kind: str) -> list[tuple[str, str]]:
        """(site, reason), each site once however often it failed in this round."""
        return list({hop.site: hop.reason for hop in self.hops if hop.kind == kind}.items())

    @property
    def path(self) -> Path | None:
        """Path of the log's file; None if nothing is kept."""
        return None if self.folder is None else self.folder / FILE

    def _save(self, path: Path) -> None:
        facts = {"key": self.key, "route": self.route, "worth": self.worth}
        facts["hops"] = [asdict(hop) for hop in self.hops]
        make_folder(path.parent)
        replace_file(path, yield_pieces(self.arrays, {"log": json.dumps(facts)}))


def _join_hops(site: str, hops: list[Hop]) -> Admitted:
    """A site's turns of one round as one reply: samples and steps added, losses weighted by samples."""
    own = [hop for hop in hops if hop.site == site]
    reported = [(hop.train_loss, hop.num_examples) for hop in own if hop.train_loss is not None]
    loss = sum(value * n for value, n in reported) / sum(n for _, n in reported) if reported else None
    return Admitted(
        site,
        {},
        max(hop.norm for hop in own),
        sum(hop.num_examples for hop in own),
        loss,
        sum(hop.steps for hop in own),
        scaled=any(hop.scaled for hop in own),
        capped=any(hop.capped for hop in own),
    )


SLOWEST_POLL = 0.05
"""Seconds between looks at the grid: every one of the many hops waits for its site alone."""


class Silent(Exception):
    """The site did not answer before the deadline, is not connected, or still works on an earlier request."""


@dataclass
class Chain:
    """The server's side of the turns of a chain of sites."""

    exchange: Exchange = field(default_factory=lambda: Exchange(slowest_poll=SLOWEST_POLL))
    sent: int = 0
    """Bytes of the latest turn's request; 0 where none went out."""

    def turn(
        self,
        grid: Grid,
        request: RoundRequest,
        site: str,
        arrays: Arrays,
        *,
        settings: str = "{}",
        held: bool,
        max_update_norm: float | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Admitted:
        """Have one site train from `arrays`; returns its admitted reply.

        settings: of the request. held: whether the site holds the model of the task before. meanwhile: called
        while it works. max_update_norm: as in Gate. Raises Refused, Rejected or Silent.
        """
        self.sent = 0
        node = request.sites.get(site)
        if node is None or self.exchange.is_busy(site):
            raise Silent(f"{'not connected' if node is None else 'still at work on an earlier request'}")
        message = request.build_request(arrays, settings=settings, **request.previous.build_fields(held=held))
        self.sent = message.tensor_bytes
        gate = Gate(arrays, request.stamp, max_update_norm)
        # another site's late reply belongs to a model that has moved on
        self.exchange.late.clear()
        for _, reply in self.exchange.run(grid, [(site, node, message)], request.deadline, meanwhile):
            return gate.admit(reply, site)
        raise Silent(f"no answer within {request.deadline:.0f} s")


@dataclass
class RingCost:
    """Totals over a run's rounds that gave a model. sites: the most that a round asked."""

    rounds: int = 0
    turns: int = 0
    bytes: int = 0
    model_bytes: int = 0
    turn_bytes: int = 0
    sites: int = 0

    def add(self, turns: int, sent: int, model: int, sites: int) -> None:
        """Add a round. turns: taken. sent: bytes both ways. model: its bytes. sites: number asked."""
        self.rounds += 1
        self.turns += turns
        self.bytes += sent
        self.model_bytes += model
        self.turn_bytes += turns * model
        self.sites = max(self.sites, sites)

    def block(self) -> dict[str, Any]:
        """The block of summary.json about a ring's traffic.

        bytes_direct: of the same ring if sites sent models to each other, and the last one to the server.
        """
        last = self.turn_bytes // self.turns if self.turns else 0
        return {
            "rounds": self.rounds,
            "hand_overs": self.turns,
            "bytes_sent": self.bytes,
            "bytes_direct": self.turn_bytes + last,
            "bytes_equation_23": self.model_bytes * self.sites,
            "bytes_equation_22": 2 * self.model_bytes * self.sites,
        }
