"""The outcome of one round: the new model, who took part, and what the operator should read about it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from perennial.protocol.tensors import byte_count
from perennial.strategies.round.gate import Admitted


@dataclass
class RoundOutcome:
    """The outcome of a round. arrays: the new global model, or None when the round was skipped."""

    arrays: dict[str, Tensor] | None = None
    participants: dict[str, Admitted] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    asked: int = 0
    """Sites asked, whether or not they answer."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    """The method's own facts about this round, JSON-able; written to the journal with the round."""
    warnings: list[str] = field(default_factory=list)
    """Sentences for the operator."""

    def take(self, reply: Admitted) -> None:
        """Note a reply that is in the model, without its update: memory must not grow with the sites."""
        self.warnings += [f"site {reply.site}: {note}" for note in reply.notes]
        self.bytes_up += byte_count(reply.update)
        self.participants[reply.site] = replace(reply, update={})

    def without_answer(self, sites: Iterable[str]) -> list[str]:
        """Those of these sites from which nothing came, not even a refusal."""
        failed = (site for site, _ in (*self.dropped, *self.refused))
        heard = {*self.participants, *failed}
        return [site for site in sites if site not in heard]

    @property
    def skipped(self) -> bool:
        return self.arrays is None

    @property
    def train_loss(self) -> float | None:
        """Mean of the sites' losses, weighted by samples; None when no site reported one."""
        reported = [
            (r.train_loss, r.num_examples)
            for _, r in sorted(self.participants.items())
            if r.train_loss is not None
        ]
        return sum(loss * n for loss, n in reported) / sum(n for _, n in reported) if reported else None
