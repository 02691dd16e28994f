"""The networks that the server trains on lent digests, and keeps from round to round."""

import copy
from typing import Any

from torch import Tensor

from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.layers import with_rows
from perennial.strategies.digest_synthesis.lending import DigestLending
from perennial.strategies.digest_synthesis.recall import Recall
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.request import Arrays
from perennial.strategies.round.run_context import RunContext


class ServerNetworks:
    """The guidance producer, velocities, and the server's own copy of layers that stay at the sites.

    lending: the digests; a group of sites shares it with the strategy of all sites.
    """

    def __init__(self, run: RunContext, lending: DigestLending) -> None:
        self.run, self.lending = run, lending
        self.own: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Reset everything that was trained on digests."""
        producer = GuidanceProducer(self.run.input_shape, self.run.experiment.seed)
        self.guidance = producer.to(self.run.device)
        self.velocities: tuple[Tensor | None, Tensor | None] = (None, None)
        self._recall: Recall | None = None
        self.seen_withdrawals = self.lending.withdrawals

    def forget_withdrawn(self) -> None:
        """Reset guidance and velocities if a site has withdrawn digests since the last reset.

        The model keeps what it has learnt; only a run without the site is free of it.
        """
        if self.lending.withdrawals != self.seen_withdrawals:
            self.begin()

    def grow(self) -> None:
        """Reset the model's velocity, whose shape changes as the model grows."""
        self._recall = None
        self.velocities = (None, self.velocities[1])

    def inherit(self, source: "ServerNetworks", own: Arrays, *, as_former: bool) -> None:
        """Copy another's guidance, and if it served this group before (as_former), its own layers too.

        Nothing that was trained on withdrawn digests is copied. own: first values of the server's own layers,
        and of their rows of new classes.
        """
        source.forget_withdrawn()
        self.lending, self.own = source.lending, dict(own)
        self.guidance.load_state_dict(source.guidance.state_dict())
        self.seen_withdrawals = source.seen_withdrawals
        if as_former:
            self.own = {name: with_rows(source.own[name], tensor) for name, tensor in own.items()}
            self.velocities = (None, source.velocities[1])

    def recall(self, reference: Arrays) -> Recall:
        """The networks that train on digests, with the model in `reference` at the first call of a task."""
        if self._recall is None:
            model = copy.deepcopy(self.run.load({**self.own, **reference}))
            assert isinstance(model, DigestTwoBranchModel)
            learner = self.run.experiment.learner
            self._recall = Recall(
                model,
                self.guidance,
                self.run.constants,
                learner.batch_size,
                learner.correction.mu if learner.correction is not None else 0.0,
                self.own.keys(),
            )
        return self._recall

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs, without the digests."""
        state = nested("guidance", self.guidance.state_dict()) | nested("own", self.own)
        for name, velocity in zip(("model", "producer"), self.velocities, strict=True):
            if velocity is not None:
                state[f"velocity/{name}"] = velocity
        return state | {"withdrawals": self.seen_withdrawals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guidance.load_state_dict(part("guidance", state))
        self.own = part("own", state)
        kept = {name: velocity.to(self.run.device) for name, velocity in part("velocity", state).items()}
        self.velocities = kept.get("model"), kept.get("producer")
        self.seen_withdrawals = state["withdrawals"]
