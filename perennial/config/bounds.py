"""What one site can do to the model at most: `bounds:` of an experiment."""

from pydantic import Field

from perennial.foundation.block import Block

MAX_SAMPLES = 1 << 20
"""A site that says it trained on more samples counts as if it had said this."""
WINDOW = 10
"""Former rounds that count."""
SHARE = 1 / 2
"""With a norm_multiple no site counts for more than all others together."""
LEAST_SITES = 4
"""Sites from which on a share of samples is bounded."""
CLOSED_FORM = ("registered", "share")
"""Keys that mean something where sites send sums."""
FORMER_MULTIPLE = 3.0
"""The default norm_multiple of 0.2.0, whose stored experiments name it in closed form too."""


class BoundsConfig(Block):
    """Bounds on what a site claims and sends; the journal names each site that met one.

    `norm_multiple: 3` turns on the bounds of norms and of shares; without a line no honest site is touched.
    They follow from former rounds; a run's first round takes its own replies for them. The norm's multiple is
    of the largest median: a task in which most sites hold next to nothing must not stop the few that do.
    """

    registered: dict[str, int] = Field(default_factory=dict)
    """Samples that single sites count for at most, from their registration; where sites send updates, in the
    place of `share`."""
    norm_multiple: float | None = Field(default=None, ge=1)
    """An update may be so many times as long as the median one; null: no bound. A longer one is scaled down.
    SCAFFOLD, FedDyn and AdaBest drop it: what a site remembers has to agree with what the server folded."""
    share: float | None = Field(default=None, gt=0, le=1)
    """The share of all samples that one site counts for at most; 1: no bound.

    null: SHARE where norm_multiple is set, else no bound. It holds from four sites on, with closed form of a
    task.
    """

    @property
    def most_share(self) -> float:
        """Largest share of all samples that one site counts for, where sites send updates."""
        if self.share is None:
            return 1.0 if self.norm_multiple is None else SHARE
        return self.share

    @property
    def in_words(self) -> str:
        """What the bounds allow, as a sentence; '' where none is set."""
        said = []
        if self.norm_multiple is not None:
            said.append(f"an update above {self.norm_multiple:g} times the median norm is scaled down to it")
        if self.most_share < 1:
            said.append(f"a site counts for at most {self.most_share:.0%} of all samples")
        if self.registered:
            said.append("registered sites count for at most what they registered with")
        return "; ".join(said)

    def require_fit(self, closed_form: bool) -> None:
        """Raises ValueError naming a key that would do nothing. closed_form: whether sites send sums."""
        here = CLOSED_FORM if closed_form else type(self).model_fields.keys()
        for key, field in type(self).model_fields.items():
            found = getattr(self, key)
            if key == "norm_multiple" and found == FORMER_MULTIPLE:
                continue
            if key not in here and found != field.get_default(call_default_factory=True):
                raise ValueError(
                    f"bounds.{key}: found {found}, which does nothing: strategy analytic has sums and no "
                    f"updates; allowed: {', '.join(CLOSED_FORM)}"
                )
