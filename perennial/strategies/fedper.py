"""FedPer: all sites average the shared layers, and each keeps the last ones for itself.

Arivazhagan et al. 2019 (arXiv 1912.00818).
"""

from perennial.config.strategies import ASKS
from perennial.strategies.clustered_personalisation import ClusteredPersonalisation
from perennial.strategies.fedavg import FedAvg


class FedPer(ClusteredPersonalisation):
    """Shared layers are averaged by samples over all sites; personal ones are the sites' own from round 1 on.

    global_rounds: of plain averaging before that, where FedPer is compared with methods that begin with a
    global model.
    """

    asks = ASKS["fedper"]

    def __init__(
        self,
        personal: tuple[str, ...] = ("head",),
        global_rounds: int | list[int] = 0,
        max_update_norm: float | None = None,
    ) -> None:
        if not personal:
            raise ValueError("personal: found no layer, which is FedAvg; allowed: at least one")
        super().__init__(
            FedAvg(),
            global_rounds,
            clusters=1,
            grouping="random",
            personal=personal,
            max_update_norm=max_update_norm,
        )
