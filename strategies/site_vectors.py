"""Asking sites for their sparsity vectors, and believing none that cannot be true."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from foundation.errors import ConfigError, ProtocolError
from foundation.streams import stream
from models.incremental import IncrementalModel
from models.sparsity import VECTOR, Combine, SparsityPlan, common_channels
from protocol.fields import Tensors
from protocol.messages import SparsityReply, SparsityRequest
from protocol.tensors import content_sha256
from strategies.ask import ask
from strategies.base import RoundRequest
from strategies.exchange import Exchange


@dataclass(frozen=True)
class VectorSettings:
    """What sites are asked for. channels: how many. variance: ask for all, keep those in which sites differ.

    epsilon, delta: of each vector, for one sample replaced; epsilon None: no noise.
    """

    channels: int
    layers: int
    combine: Combine
    variance: bool
    epsilon: float | None
    delta: float

    def available(self, model: IncrementalModel, input_shape: tuple[int, ...]) -> int:
        """Channels that can be asked for. Raises ConfigError when there are fewer than are wanted."""
        device = next(model.parameters()).device
        sample = torch.zeros(1, *input_shape, device=device)
        found = common_channels(model, sample, self.layers, self.combine)
        if self.channels > found:
            raise ConfigError(
                f"strategy.channels: found {self.channels}, allowed 1 to {found}, the channels that the "
                f"first {self.layers} ReLU layers of this network have in common"
            )
        return found

    def first_plan(self, available: int, seed: int) -> SparsityPlan:
        """What the first vectors are made of: a seeded choice of channels, or all where variance decides."""
        if self.variance:
            return self.plan(range(available))
        chosen = stream(seed, "sparsity-channels").choice(available, self.channels, replace=False)
        return self.plan(sorted(chosen.tolist()))

    def plan(self, channels: Sequence[int]) -> SparsityPlan:
        return SparsityPlan(tuple(channels), self.layers, self.combine)


def most_varied(vectors: dict[str, np.ndarray], plan: SparsityPlan, count: int) -> list[int]:
    """The channels of a plan whose variance between sites, over all its layers, is largest; sorted."""
    matrix = np.stack([vectors[site] for site in sorted(vectors)])
    variance = matrix.var(axis=0).reshape(-1, len(plan.channels)).sum(axis=0)
    largest = np.argsort(-variance, kind="stable")[:count]
    return sorted(plan.channels[index] for index in largest)


def of_channels(vector: np.ndarray, plan: SparsityPlan, channels: Sequence[int]) -> np.ndarray:
    """The entries of a vector that belong to some of its plan's channels."""
    kept = [plan.channels.index(channel) for channel in channels]
    return vector.reshape(-1, len(plan.channels))[:, kept].ravel()


def ask_vectors(
    grid: Grid,
    exchange: Exchange,
    request: RoundRequest,
    sites: Sequence[str],
    plan: SparsityPlan,
    settings: VectorSettings,
    dropped: Callable[[str, str], None],
) -> dict[str, np.ndarray]:
    """(plan.length,) float64 of each site that gave a valid vector of the round's global model."""
    common: dict[str, Any] = {
        **request.stamp.stamp_fields,
        "arrays": Tensors(request.arrays),
        "previous": request.previous,
        "channels": list(plan.channels),
        "layers": plan.layers,
        "combine": plan.combine,
        "epsilon": settings.epsilon,
        "delta": None if settings.epsilon is None else settings.delta,
    }
    holder, other = SparsityRequest(**common), SparsityRequest(**common)
    if request.previous_arrays is not None:
        other = SparsityRequest(**common, previous_arrays=Tensors(request.previous_arrays))
    fingerprint = plan.fingerprint(content_sha256(request.arrays))
    replies = ask(
        grid,
        exchange,
        [(site, request.sites[site], holder if site in request.holders else other) for site in sites],
        SparsityReply,
        request.deadline,
        dropped,
        lambda reply: check_vector(reply, plan, fingerprint),
    )
    return {site: reply.vector[VECTOR].double().cpu().numpy() for site, reply in replies.items()}


def check_vector(reply: SparsityReply, plan: SparsityPlan, fingerprint: str) -> None:
    """Raises ProtocolError when a vector is of another model or channels, or no mean of shares."""
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
