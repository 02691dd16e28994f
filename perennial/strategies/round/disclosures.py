"""What a strategy needs from the sites beside the protected update, by which a privacy claim is judged."""

from dataclasses import dataclass

from perennial.privacy.combinations import ReleaseProtection


@dataclass(frozen=True)
class Disclosures:
    """What a method needs from the sites beside the update.

    weights_use_metrics: a site's weight depends on loss or accuracy that it reports.
    clear_uploads: names of arrays or figures that replies carry without noise.
    sparsity: the unit that the release's own noise hides, "none" without a proven guarantee; None when it is
    not sent.
    """

    weights_use_metrics: bool = False
    clear_uploads: tuple[str, ...] = ()
    sparsity: ReleaseProtection | None = None

    def __or__(self, other: "Disclosures") -> "Disclosures":
        """What two methods, one around the other, need."""
        return Disclosures(
            self.weights_use_metrics or other.weights_use_metrics,
            tuple(dict.fromkeys((*self.clear_uploads, *other.clear_uploads))),
            other.sparsity if self.sparsity is None else self.sparsity,
        )
