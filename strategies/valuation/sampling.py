"""How the Shapley values of one game are computed: over all coalitions, or over some orders of joining."""

from dataclasses import dataclass

import numpy as np

from perennial.strategies.valuation.shapley import MOST_EXACT, Value, exact, over_permutations


@dataclass(frozen=True)
class Sampling:
    """The choice between all coalitions and drawn orders, for a game of any number of players.

    exact: all coalitions, whatever they cost.
    permutations: orders drawn at most; None: the larger of 30 and three times the players.
    cheap: values cost little, so that without `permutations` all coalitions are taken up to 12 players.
    """

    exact: bool
    permutations: int | None
    cheap: bool

    def takes_all(self, players: int) -> bool:
        """Whether every coalition is valued."""
        return self.exact or (self.cheap and self.permutations is None and players <= MOST_EXACT)

    def coalitions(self, players: int) -> int:
        """The most coalitions that a game asks the value of."""
        return 2**players if self.takes_all(players) else players * self._orders(players)

    def values(self, players: int, value: Value, generator: np.random.Generator) -> np.ndarray:
        """(N,) Shapley value of each player. generator: draws the orders.

        Raises ValueError for more than 12 players of an exact game, or none.
        """
        if self.takes_all(players):
            return exact(players, value)
        drawn = (generator.permutation(players) for _ in range(self._orders(players)))
        return over_permutations(players, value, drawn, truncation=1e-3, stop=0.05)

    def _orders(self, players: int) -> int:
        return self.permutations or max(30, 3 * players)
