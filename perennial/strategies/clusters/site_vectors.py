"""Asks sites for their sparsity vectors, and rejects vectors that cannot be true."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import nn

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.foundation.streams import stream
from perennial.models.sparsity import MODEL, VECTOR, Combine, SparsityPlan, common_channels, relu_calls
from perennial.privacy.entries import Entry
from perennial.protocol.messages import SparsityReply, SparsityRequest
from perennial.protocol.tensors import Tensors, content_sha256
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import ask
from perennial.strategies.round.request import RoundRequest


@dataclass(frozen=True)
class VectorSettings:
    """How sites compute sparsity vectors.

    channels: how many; None: as many as there are. layers: number of first ReLU calls; None: all that the
    network makes. combine: see SparsityPlan. epsilon, delta: of each vector, for one sample
    replaced; epsilon None: no noise.
    """

    channels: int | None
    layers: int | None
    combine: Combine
    epsilon: float | None
    delta: float

    def whole_plan(self, network: nn.Module, input_shape: tuple[int, ...]) -> SparsityPlan:
        """The plan of all channels that the layers have in common. Raises ConfigError if they are too few."""
        sample = torch.zeros(1, *input_shape, device=next(network.parameters()).device)
        layers = self.layers or relu_calls(network, sample)
        found = common_channels(network, sample, layers, self.combine)
        if self.channels is not None and self.channels > found:
            which = "last of the first" if self.combine == "last" else "first"
            raise ConfigError(
                f"strategy.channels: found {self.channels}, allowed 1 to {found}, the channels that the "
                f"{which} {layers} ReLU layers of this network have in common"
            )
        return SparsityPlan(tuple(range(found)), layers, self.combine)

    def first_plan(self, whole: SparsityPlan, seed: int) -> SparsityPlan:
        """The plan of the first vectors: channels drawn with the seed, or all."""
        if self.channels is None:
            return whole
        chosen = stream(seed, "sparsity-channels").choice(len(whole.channels), self.channels, replace=False)
        return replace(whole, channels=tuple(sorted(chosen.tolist())))

    def charge(self, experiment: Experiment, run: str) -> Entry:
        """The ledger entry that one vector costs a site."""
        return charges.sparsity(experiment, run, self.epsilon, self.delta).entry


def ask_vectors(
    grid: Grid,
    exchange: Exchange,
    request: RoundRequest,
    sites: Sequence[str],
    plan: SparsityPlan,
    settings: VectorSettings,
    dropped: Callable[[str, str], None],
) -> dict[str, np.ndarray]:
    """Ask sites for their sparsity vectors: site -> (plan.length,) float64, for valid replies.

    dropped: called with (site, reason) for each site that fails.
    """
    arrays = Tensors(request.arrays)
    common: dict[str, Any] = {
        **request.stamp.stamp_fields,
        "arrays": arrays,
        "network": MODEL,
        "channels": list(plan.channels),
        "layers": plan.layers,
        "combine": plan.combine,
        "epsilon": settings.epsilon,
        "delta": None if settings.epsilon is None else settings.delta,
    }
    messages: dict[str, SparsityRequest] = {}
    for some, fields in request.previous.fields_for(sites):
        messages |= dict.fromkeys(some, SparsityRequest(**common, **fields))
    fingerprint = plan.fingerprint(content_sha256(arrays))
    replies = ask(
        grid,
        exchange,
        [(site, request.sites[site], messages[site]) for site in sites],
        SparsityReply,
        request.deadline,
        dropped,
        lambda reply: check_vector(reply, plan, fingerprint),
    )
    return {site: reply.vector[VECTOR].double().cpu().numpy() for site, reply in replies.items()}


def check_vector(reply: SparsityReply, plan: SparsityPlan, fingerprint: str) -> None:
    """Raise ProtocolError if a vector is of another model or other channels, or has values outside 0 to 1."""
    if reply.extractor != fingerprint:
        raise ProtocolError(
            f"SparsityReply: extractor: found {reply.extractor:.12}, expected {fingerprint:.12}: the vector "
            "is of another model or other channels"
        )
    found = {name: tuple(tensor.shape) for name, tensor in reply.vector.items()}
    if found != {VECTOR: (plan.length,)}:
        raise ProtocolError(f"SparsityReply: vector: found {found}, expected {VECTOR}: ({plan.length},)")
    low, high = (float(value) for value in reply.vector[VECTOR].aminmax())
    if not 0 <= low <= high <= 1:
        raise ProtocolError(
            f"SparsityReply: vector: found values from {low:.4g} to {high:.4g}, allowed 0 to 1"
        )
