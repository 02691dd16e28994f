"""Who takes part in a round, and how long the server waits: `rounds:` of an experiment."""

import operator

from pydantic import Field

from perennial.foundation.block import Block


class RoundsConfig(Block):
    """Who takes part in a round, and how long the server waits."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the connected sites that is asked in each round."""
    quorum: int = Field(default=1, ge=1)
    """Valid replies without which a round does not count: the model stays as it was."""
    deadline: float = Field(default=3600.0, gt=0)
    """Seconds after which a round goes on without the sites that have not answered."""
    wait_for: int | None = Field(default=None, ge=1)
    """Sites that must be connected before the run starts; default: all of them in simulation, 1 otherwise."""
    join_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for them, and for a quorum of sites to come back when a round finds fewer connected."""
    asynchronous: bool = Field(default=False, exclude_if=operator.not_)
    """strategy analytic: a round ends as soon as some site has answered, and a task when all have, after
    tasks.rounds rounds at most; requests are renewed, and answered whenever a site can."""
    max_skipped: int = Field(default=3, ge=1)
    """Attempts in a row without a quorum after which a simulation ends with an error (it can be resumed) and
    a deployed run rests. The round is asked again: none of those planned is used up."""
