"""Counts a ring's traffic, beside what the formulas of its paper say.

Yan et al. 2025 (arXiv 2506.16723), equations 22 and 23.
"""

from dataclasses import dataclass
from typing import Any


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
