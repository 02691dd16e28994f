"""Who takes part in a round and how long the server waits, and the rounds of pre-training before task 1."""

from pydantic import Field

from perennial.foundation.block import Block
from perennial.foundation.errors import ConfigError

JOIN_SECONDS = 600.0


class RoundsConfig(Block):
    """Who takes part in a round, and how long the server waits."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the connected sites that is asked in each round."""
    quorum: int = Field(default=1, ge=1)
    """Valid replies without which a round does not count: the model stays as it was."""
    deadline: float = Field(default=3600.0, gt=0)
    """Seconds after which a round goes on without the sites that have not answered. The server waits as long,
    and no longer than JOIN_SECONDS, for sites to connect, and for a quorum of them to come back."""
    wait_for: int | None = Field(default=None, ge=1)
    """Sites that must be connected before the run starts; default: all of them in simulation, 1 otherwise."""
    max_skipped: int = Field(default=3, ge=1)
    """Attempts in a row without a quorum after which a simulation ends with an error (it can be resumed) and
    a deployed run rests. The round is asked again: none of those planned is used up."""

    @property
    def join_seconds(self) -> float:
        """Seconds to wait for sites that are not connected."""
        return min(self.deadline, JOIN_SECONDS)


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
