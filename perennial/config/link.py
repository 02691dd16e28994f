"""A radio link between two sites, for the time that hand-overs of a ring would take on it."""

import math
from typing import Annotated

from pydantic import Field

from perennial.foundation.block import Block

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Link(Block):
    """A radio link by Shannon's capacity (Yan et al. 2025, arXiv 2506.16723, equation 13).

    bandwidth: Hz. power: W, of the sender. gain: of the channel, received over sent power. noise: W/Hz if
    noise_is_density, as the paper's text says, which its formula multiplies by the bandwidth; otherwise W in
    the whole band.
    """

    bandwidth: Positive
    power: Positive
    gain: Positive
    noise: Positive
    noise_is_density: bool = True

    @property
    def rate(self) -> float:
        """Capacity of the link in bits a second."""
        noise = self.noise * self.bandwidth if self.noise_is_density else self.noise
        return self.bandwidth * math.log2(1 + self.power * self.gain / noise)

    def seconds(self, size: int) -> float:
        """Seconds that so many bytes take (equation 14)."""
        return 8 * size / self.rate
