"""Sparsity vectors: how often each channel of the first ReLU layers is silent on a site's samples.

v^l_c(x) is the share of zeros in channel c of the l-th ReLU's output for sample x; a site's vector is its
mean over the samples. Sites whose data excite the same channels get near vectors. Yang et al. 2022 (FedPerC,
doi 10.18293/SEKE2022-100); extraction as in Liu et al. 2021 (PFA, WWW).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError, DataError
from perennial.foundation.streams import stream

Combine = Literal["average", "last"]
VECTOR = "sparsity"
"""Name of the vector among the tensors of a message."""
USUAL_CHANNELS = 20
"""Of PFA."""


@dataclass(frozen=True)
class SparsityPlan:
    """What is measured. channels: indices, the same in every layer. layers: number of first ReLU calls.

    combine: "average" over the layers as published; "last" takes the last of the layers alone.
    """

    channels: tuple[int, ...]
    layers: int
    combine: Combine = "average"

    @property
    def length(self) -> int:
        """Number of entries of the vector."""
        return len(self.channels)

    def fingerprint(self, model_sha256: str) -> str:
        """SHA-256 (hex) of the plan and the model: vectors with different ones cannot be compared."""
        text = f"{model_sha256}|{self.combine}|{self.layers}|{','.join(map(str, self.channels))}"
        return hashlib.sha256(text.encode()).hexdigest()

    def vector(self, zeros: list[Tensor]) -> Tensor:
        """Combine each layer's (C_l,) shares of zeros into a (length,) float64 vector, as the plan says.

        Raises ConfigError when a layer does not have all the plan's channels.
        """
        layers = zeros[-1:] if self.combine == "last" else zeros
        least = min(len(layer) for layer in layers)
        if not self.channels or not 0 <= min(self.channels) <= max(self.channels) < least:
            raise ConfigError(
                f"channels: found indices up to {max(self.channels, default=-1)}; the ReLU layers that are "
                f"measured have {least} channels, so 0 to {least - 1} are allowed, and at least one"
            )
        return torch.stack([layer[list(self.channels)] for layer in layers]).mean(dim=0)


@dataclass(frozen=True)
class VectorSettings:
    """How sites compute sparsity vectors.

    channels: how many; None: as many as there are. layers: number of first ReLU calls; None: all that the
    network makes. combine: see SparsityPlan. epsilon: of each vector; None: no noise.
    """

    channels: int | None
    layers: int | None
    combine: Combine
    epsilon: float | None

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "VectorSettings":
        """From the keys of an experiment's clustered_personalisation or pfa."""
        channels = keys.get("channels", USUAL_CHANNELS if "layer" in keys else None)
        layers = keys.get("layers", keys.get("layer"))
        return cls(channels, layers, keys.get("combine", "last"), keys.get("sparsity_epsilon"))

    def build_whole_plan(self, network: nn.Module, input_shape: tuple[int, ...]) -> SparsityPlan:
        """The plan of all channels that the layers have in common. Raises ConfigError if they are too few."""
        sample = torch.zeros(1, *input_shape, device=next(network.parameters()).device)
        layers = self.layers or count_relu_calls(network, sample)
        found = count_common_channels(network, sample, layers, self.combine)
        if self.channels is not None and self.channels > found:
            which = "last of the first" if self.combine == "last" else "first"
            raise ConfigError(
                f"strategy.channels: found {self.channels}, allowed 1 to {found}, the channels that the "
                f"{which} {layers} ReLU layers of this network have in common"
            )
        return SparsityPlan(tuple(range(found)), layers, self.combine)

    def plan(self, network: nn.Module, input_shape: tuple[int, ...], seed: int) -> SparsityPlan:
        """What server and sites measure: channels drawn with the experiment's seed, or all."""
        whole = self.build_whole_plan(network, input_shape)
        if self.channels is None:
            return whole
        chosen = stream(seed, "sparsity-channels").choice(len(whole.channels), self.channels, replace=False)
        return replace(whole, channels=tuple(sorted(chosen.tolist())))


def count_common_channels(model: nn.Module, sample: Tensor, layers: int, combine: Combine) -> int:
    """Number of channels that a plan can choose from, of the first `layers` ReLU calls.

    combine: "last" takes the last of these layers; otherwise the fewest channels of any. sample: (1, ...)
    input of any values.
    """
    widths = [output.shape[1] for output in _collect_relu_outputs(model, sample, layers)]
    return widths[-1] if combine == "last" else min(widths)


def count_relu_calls(model: nn.Module, sample: Tensor) -> int:
    """How often a forward pass calls a ReLU. sample: (1, ...) input of any values."""
    with torch.no_grad(), _record_outputs(model, None) as outputs:
        model(sample)
    return len(outputs)


@torch.no_grad()
def zero_shares(
    model: nn.Module, batches: Iterable[tuple[Tensor, slice | Tensor, slice | Tensor]], layers: int
) -> list[Tensor]:
    """(C_l,) float64 share of exact zeros of each channel, for the first `layers` ReLU calls of a model.

    model: in evaluation mode. batches: of learning.batches.in_batches(): inputs (B, ...), whose they are, and
    which of them count. Zeros are counted as whole numbers, so the order of the samples does not matter, and
    NaN is none. Raises ConfigError when the network calls fewer ReLUs than asked, DataError on no samples.
    """
    zeros: list[Tensor] = []
    indices, seen = [0] * layers, 0
    for inputs, _, counting in batches:
        outputs = _collect_relu_outputs(model, inputs, layers)
        for layer, output in enumerate(outputs):
            flat = (output.flatten(2) if output.dim() > 2 else output[:, :, None])[counting]
            count = (flat == 0).sum(dim=(0, 2))
            if seen:
                zeros[layer] += count
            else:
                zeros.append(count)
            indices[layer] = flat.shape[2]
        seen += len(inputs[counting])
    if seen == 0:
        raise DataError("sparsity: a site without samples has no sparsity vector")
    return [(count.double() / (seen * place)).cpu() for count, place in zip(zeros, indices, strict=True)]


@torch.no_grad()
def _collect_relu_outputs(model: nn.Module, inputs: Tensor, layers: int) -> list[Tensor]:
    """Outputs of the first ReLU calls, in the order of execution.

    A module that is called twice counts twice.
    """
    with _record_outputs(model, layers) as outputs:
        model(inputs)
    if len(outputs) < layers:
        raise ConfigError(
            f"layers: found {layers}, but the network calls {len(outputs)} ReLU modules; sparsity needs "
            "exact zeros, which other activations do not give"
        )
    return outputs


@contextmanager
def _record_outputs(model: nn.Module, layers: int | None) -> Iterator[list[Tensor]]:
    """Outputs of the first ReLU calls while it is open; of all calls without a number."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, arguments: object, output: Tensor) -> None:
        if layers is None or len(outputs) < layers:
            # an operation in place that follows the ReLU would change what was recorded
            outputs.append(output.detach().clone())

    handles = [
        module.register_forward_hook(record)
        for module in model.modules()
        if isinstance(module, nn.ReLU | nn.ReLU6)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
