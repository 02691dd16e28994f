"""PFA: sites whose sparsity vectors are near train one whole model together.

Liu et al. 2021 (WWW, "PFA: Privacy-preserving Federated Adaptation for Effective Model Personalization"). The
released code takes 20 random channels of one late ReLU layer; it prints distances and
leaves the grouping open.
"""

from perennial.config.strategies import ASKS
from perennial.strategies.clustered_personalisation.method import ClusteredPersonalisation
from perennial.strategies.fedavg import FedAvg


class PFA(ClusteredPersonalisation):
    """Plain averaging inside each group, from the global model on; nothing is personal but the group.

    layer: the ReLU call that is measured, from 1. channels: of it, a seeded choice. groups: known ones, to
    measure how well they are found. Sites whose distance is below the middle of the widest gap between
    pairwise distances belong together.
    """

    asks = ASKS["pfa"]

    def __init__(
        self,
        global_rounds: int | list[int],
        layer: int,
        channels: int = 20,
        groups: list[list[str]] | None = None,
        sparsity_epsilon: float | None = None,
    ) -> None:
        if layer < 1:
            raise ValueError(f"layer: found {layer}, allowed 1 or more")
        super().__init__(
            FedAvg(),
            global_rounds,
            grouping="threshold",
            groups=groups,
            personal=(),
            channels=channels,
            layers=layer,
            combine="last",
            sparsity_epsilon=sparsity_epsilon,
        )
