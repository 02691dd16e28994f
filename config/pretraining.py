"""Balanced pre-training: the same number of samples from each site, before task 1."""

from pydantic import Field

from perennial.foundation.block import Block
from perennial.foundation.errors import ConfigError


class PretrainingConfig(Block):
    """Rounds of plain averaging before the first task, after which the experiment's own strategy takes over.

    Hu et al. 2022 (Appl. Sci. 12(19):10025), who give neither number.
    """

    samples: int = Field(default=64, ge=1)
    """Training samples that each site uses, its classes of task 1 as evenly as it has them."""
    rounds: int = Field(default=3, ge=1)
    """Rounds that come before those of task 1."""
    exclude: bool = False
    """Leave these samples out of the rest of task 1, as the paper does."""

    def require(self, site: str, available: int) -> None:
        """Raises ConfigError when a site has fewer samples of task 1 than pre-training asks of each."""
        if available < self.samples:
            raise ConfigError(
                f"pretraining.samples: found {self.samples}, but site {site!r} has {available} training "
                "samples of task 1; allowed at most the number at the smallest site"
            )
        if self.exclude and available == self.samples:
            raise ConfigError(
                f"pretraining.exclude: site {site!r} has no sample of task 1 but the {available} of "
                "pretraining.samples; allowed with fewer of them"
            )
