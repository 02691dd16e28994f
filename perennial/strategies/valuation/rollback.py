"""Decides whether a round made the model so much worse that it is rolled back.

A round may lose a little by chance, and more where sites hold different classes. So a round is judged beside
the held-out samples' own uncertainty and beside what the task's earlier rounds did.
"""

from dataclasses import dataclass, field
from statistics import median

EARLIER = 4
"""Rounds of a task that must be known before one of them can be rolled back."""
DEVIATIONS = 3.0
IN_A_ROW = 2
"""Rounds that may be rolled back one after the other, so that a run whose data changed goes on learning."""
NORMAL = 1.4826
"""Standard deviation of a normal law over its median absolute deviation."""


@dataclass
class Rollback:
    """The rule of one run. changes: of the utility, by the rounds of this task that were kept."""

    task: int = 0
    changes: list[float] = field(default_factory=list)
    in_a_row: int = 0
    rounds: int = 0
    """Rounds rolled back in the whole run."""

    def limit(self, error: float) -> float | None:
        """The change of utility below which a round is rolled back; None while too little is known.

        error: standard error of the change, from the held-out samples.
        """
        if len(self.changes) < EARLIER or self.in_a_row >= IN_A_ROW:
            return None
        middle = median(self.changes)
        spread = NORMAL * median(abs(change - middle) for change in self.changes)
        return min(0.0, middle) - DEVIATIONS * (error**2 + spread**2) ** 0.5

    def refuses(self, task: int, change: float, error: float) -> bool:
        """Whether to roll back a round of this task with this change of utility; notes the answer."""
        if task != self.task:
            self.task, self.changes, self.in_a_row = task, [], 0
        limit = self.limit(error)
        if limit is not None and change < limit:
            self.in_a_row += 1
            self.rounds += 1
            return True
        self.changes.append(change)
        self.in_a_row = 0
        return False
