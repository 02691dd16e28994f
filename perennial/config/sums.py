"""How updates are added up: `sums:` of an experiment."""

from typing import TYPE_CHECKING

from pydantic import Field

from perennial.foundation.block import Block

if TYPE_CHECKING:
    from perennial.models.sum_grid import SumGrid


class SumsConfig(Block):
    """The public grid of a run's sums (models/sum_grid.py)."""

    largest_norm: float = Field(default=1024.0, gt=0, lt=1e30)
    """L2 norm that an update of the largest weight may have; at half the weight it may be twice that."""

    def grid(self, updates: int, largest_weight: float) -> "SumGrid":
        """The grid for the sum of at most `updates` updates, none with a weight above largest_weight."""
        from perennial.models.sum_grid import SumGrid  # torch, which saying who it is spares a site

        return SumGrid(max(1, updates), largest_weight, self.largest_norm)
