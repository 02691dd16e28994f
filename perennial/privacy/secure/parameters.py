"""How many sites must be there, and how many may be dishonest, for a sum to be opened.

With n sites in the roster of which c may collude with the server, t = floor((n + c) / 2) + 1 shares open a
secret: two sets of t sites then have an honest site in common, and an honest site opens once.
"""

from dataclasses import dataclass

from perennial.foundation.errors import PolicyRefusal

MOST_SITES = 100
"""In one sum: every two sites share a mask."""


@dataclass(frozen=True)
class Parameters:
    """The numbers of secure aggregation that an experiment fixes.

    colluders: sites that may collude with the server, c. least: fewest values in a sum. quorum: fewest
    survivors for opening; 0: as many as t. honest: honest survivors that shared noise is sized for, m.
    """

    colluders: int = 0
    least: int = 2
    quorum: int = 0
    honest: int = 0

    def threshold(self, sites: int) -> int:
        """Number of shares, t, that open a secret of one of this many sites."""
        return (sites + self.colluders) // 2 + 1

    def survivors_needed(self, sites: int) -> int:
        """Fewest survivors with which a roster of this many sites opens a sum."""
        return max(self.quorum, self.least, self.threshold(sites), self.colluders + max(2, self.honest))

    def check_roster(self, sites: int) -> None:
        """Raises PolicyRefusal when a roster of so many sites can never be opened safely, or is too large."""
        if sites > MOST_SITES:
            raise PolicyRefusal(
                f"secure: a roster of {sites} sites; allowed {MOST_SITES}, each of which shares a mask with "
                "each other one"
            )
        if sites < self.survivors_needed(sites):
            raise PolicyRefusal(
                f"secure: a roster of {sites} sites; with assumed_colluders {self.colluders}, least "
                f"{self.least} and quorum {self.quorum} a sum needs {self.survivors_needed(sites)}"
            )

    def check_survivors(self, sites: int, survivors: int) -> None:
        """Raises PolicyRefusal when so few of a roster's sites survive that nothing may be opened."""
        needed = self.survivors_needed(sites)
        if survivors < needed:
            raise PolicyRefusal(
                f"secure: {survivors} of {sites} sites sent masked values; a sum is opened from {needed} on"
            )
