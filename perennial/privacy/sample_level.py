"""DP-SGD inside a site: one private gradient for each Poisson batch, made with Opacus.

Opacus takes the gradient of each sample; the noise comes from our source, once on the whole flat gradient,
because Opacus's own secure mode needs a package that no longer builds. The learner keeps its model, optimizer
and loop: it asks for a gradient where it would have called backward().

Shapes: B samples in the Poisson batch, P trainable parameters.

Abadi et al. 2016 (arXiv 1607.00133).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from perennial.foundation.devices import to_device
from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.protection import ROUNDING_MARGIN

BLOCK = 32
"""Samples that a model sees at once under a protection, neither more nor fewer. A Poisson batch of this size
takes about four blocks, and twice the time of one batch as it is."""
Losses = Callable[[Tensor], Tensor]
"""(indices,) int64 in a batch -> (indices,) losses."""
LARGEST_NORM = 2.0**63
"""Of a gradient that counts: its square is still a float32 number."""


def split_blocks(places: Tensor, size: int | None = None) -> Tensor:
    """(K, size) int64: for each place of K blocks the sample that lies there, or -1.

    A library adds in another order for another number of rows, and in another order at another place of a
    row. A server can build a model that magnifies such a last bit into another class, so that one record more
    would change what all others give. In a block of one size, at a place that follows from the sample alone,
    its answer depends on nothing but the sample.

    places: (n,) int64 of the samples, in any range. size: None for BLOCK.
    """
    size = size or BLOCK
    at = places.cpu().numpy() % size
    order = np.argsort(at, kind="stable")
    filled = np.bincount(at, minlength=size)
    block = np.arange(len(at)) - (np.cumsum(filled) - filled)[at[order]]
    table = np.full((filled.max(), size), -1, dtype=np.int64)
    table[block, at[order]] = order
    return torch.from_numpy(table)


def draw_poisson_batches(samples: int, sample_rate: float, steps: int, source: Noise) -> Iterator[Tensor]:
    """Index batches (B,) int64 in which each sample is present independently with probability sample_rate.

    B varies and may be 0: an empty batch is a step too, and skipping it would reveal that it was empty.
    source: the one of the noise. Amplification counts on nobody knowing who was in a batch, so a seed that
    the server knows would undo it.
    Without samples every batch is empty: that all have spent their budget must not show.
    Raises PrivacyError on a rate outside (0, 1].
    """
    if not 0 < sample_rate <= 1:
        raise PrivacyError(f"sample rate {sample_rate} over {samples} samples; allowed: (0, 1]")
    for _ in range(steps):
        yield (source.uniform(samples) <= sample_rate).nonzero()[:, 0]


class PrivateGradient:
    """Private gradients of one model, as a context manager that attaches Opacus and leaves no trace of it.

        with PrivateGradient(model, privacy, expected_batch=q * n, source=source) as private:
            for batch in poisson_batches(n, q, steps, source):
                private.compute(data.places[batch], lambda rows: losses(x[batch[rows]], y[batch[rows]]))
                optimizer.step()

    After compute, .grad of each trainable parameter is its part of
    (sum_i clip(g_i) + N(0, (noise_multiplier * clip_norm)^2)) / expected_batch,
    each sample's gradient clipped over all parameters together. A sample whose gradient is not finite counts
    as 0: a model can be made so that one sample overflows, and whether it was there must not show.
    """

    def __init__(
        self,
        model: nn.Module,
        privacy: PrivacyConfig,
        expected_batch: float,
        source: Noise,
    ) -> None:
        """expected_batch: what a batch's sum is divided by: a public number; never the batch's own size.

        Raises PrivacyError when the mode is not "sample", or the model has layers that mix samples.
        """
        if privacy.mode != "sample" or privacy.clip_norm is None or privacy.noise_multiplier is None:
            raise PrivacyError(
                f"per-sample gradients belong to privacy mode sample; the mode is {privacy.mode}"
            )
        if not expected_batch > 0:
            raise PrivacyError(f"expected batch is {expected_batch}; allowed: above 0")
        refuse_mixing_layers(model)
        self._model = model
        self._clip_norm = privacy.clip_norm
        self._noise_multiplier = privacy.noise_multiplier
        # a look for gradients that are not finite is cheaper on a processor than one more pass over those of
        # all samples; a GPU would be waited for in every step
        self._looks = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._expected_batch = expected_batch
        self._source = source
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hooks: Any = None

    def __enter__(self) -> Self:
        from opacus.grad_sample import GradSampleHooks

        try:
            self._hooks = GradSampleHooks(self._model, loss_reduction="sum")
        except NotImplementedError as error:
            raise PrivacyError(f"a layer has no per-sample gradient: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.cleanup()

    def compute(self, places: Tensor, losses: Losses, patients: Tensor | None = None) -> Tensor:
        """Set the private gradient of one Poisson batch; returns its mean loss (private; nan when empty).

        The mean is a float64 number on the device, so that nobody waits for it. places: (B,) int64, a number
        that each sample has by its content, as split_blocks() takes it; none are allowed. losses: takes BLOCK
        indices in the batch, some of them more than once, and returns their losses, each depending on its own
        sample alone. patients: (B,) int64, patient number of each sample; then the sum of a patient's
        gradients is clipped, and no block holds two patients. A parameter that already has a .grad keeps its
        memory, so a flat gradient vector stays one.
        Raises PrivacyError on losses of another shape, or in evaluation mode, in which Opacus sees nothing.
        """
        if not self._model.training:
            raise PrivacyError("the model is in evaluation mode, in which Opacus sees no per-sample gradient")
        sizes = [parameter.numel() for parameter in self._parameters]
        homes = [parameter.grad for parameter in self._parameters]
        # float32 rounds a large sum by another amount when one sample is added to it
        vector = torch.zeros(sum(sizes), dtype=torch.float64, device=self._parameters[0].device)
        try:
            self._forget_gradients()
            with _silence_remarks():
                loss = (
                    self._add_samples(vector, places, losses)
                    if patients is None
                    else self._add_patients(vector, losses, patients)
                )
            add_noise(vector, self._noise_multiplier * self._clip_norm, self._source)
            vector = vector.float() / self._expected_batch
        finally:
            self._forget_gradients()
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.grad = home
        for parameter, part in zip(self._parameters, vector.split(sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter)
            else:
                parameter.grad.copy_(part.view_as(parameter))
        return loss.double() / len(places) if len(places) else torch.full_like(loss.double(), math.nan)

    def measure_clipped_norms(self, places: Tensor, losses: Losses) -> Tensor:
        """(B,) L2 norms of the samples' clipped gradients: how far each sample moves the sum.

        The norms are private. The model's gradients stay as they were. Arguments as in compute.
        """
        homes = [parameter.grad for parameter in self._parameters]
        found = torch.zeros(len(places), device=self._parameters[0].device)
        try:
            self._forget_gradients()
            with _silence_remarks():
                for block in split_blocks(places):
                    there = (block >= 0).nonzero()[:, 0]
                    norms = self._compute_gradients(block, losses)[1][to_device(there, found.device)]
                    norms = torch.where(norms.isfinite(), norms.clamp(max=self._clip_norm), 0.0).float()
                    found[to_device(block[there], found.device)] = norms
                    self._forget_gradients()
        finally:
            self._forget_gradients()
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.grad = home
        return found

    def _add_samples(self, vector: Tensor, places: Tensor, losses: Losses) -> Tensor:
        """Add the clipped gradients of the batch to vector, block by block; returns the sum of the losses."""
        total = torch.zeros((), device=vector.device)
        for block in split_blocks(places):
            loss, norms = self._compute_gradients(block, losses)
            counts = to_device(block >= 0, vector.device) & norms.isfinite()
            vector += self._sum(torch.where(counts, self._factors(norms), 0.0))
            total += torch.where(counts, loss, 0.0).sum()
            self._forget_gradients()
        return total

    def _add_patients(self, vector: Tensor, losses: Losses, patients: Tensor) -> Tensor:
        """Add the clipped sum of each patient's gradients; a patient whose sum is not finite counts as 0."""
        total = torch.zeros((), device=vector.device)
        order = torch.argsort(patients, stable=True).cpu()
        sizes = torch.unique_consecutive(patients.cpu()[order], return_counts=True)[1].tolist()
        for members in order.split(sizes) if sizes else ():
            own = torch.zeros_like(vector)
            for rows in members.split(BLOCK):
                block = torch.nn.functional.pad(rows, (0, BLOCK - len(rows)), value=-1)
                loss, norms = self._compute_gradients(block, losses)
                counts = to_device(block >= 0, vector.device) & norms.isfinite()
                own += self._sum(counts.float())
                total += torch.where(counts, loss, 0.0).sum()
                self._forget_gradients()
            norm = _compute_norms([own[None]])[0]
            vector += torch.where(norm.isfinite(), own * self._factors(norm), 0.0)
        return total

    def _factors(self, norms: Tensor) -> Tensor:
        """Float32 factors that shorten gradients of these float64 norms to the clip norm, never above it.

        Rounding the factor and each scaled coordinate to float32 is allowed for.
        """
        longer = norms > self._clip_norm
        factors = torch.where(longer, self._clip_norm / norms * ROUNDING_MARGIN, 1.0).float()
        return torch.where(factors < torch.finfo(torch.float32).tiny, 0.0, factors)

    def _compute_gradients(self, block: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
        """((BLOCK,) losses, (BLOCK,) norms) of one block's samples, after backward().

        Gradients that are not finite are 0 from here on: a factor of 0 would make no 0 of them. block: as of
        split_blocks(); where no sample is, the gradient is some other sample's.
        """
        loss = self._compute_losses(block.clamp(min=0), losses)
        loss.sum().backward()
        norms = self._measure_norms()
        finite = norms.isfinite()
        if not (self._looks and bool(finite.all())):
            for parameter in self._parameters:
                found = vars(parameter).get("grad_sample")
                if found is not None:
                    chosen = finite.view(-1, *[1] * (found.ndim - 1))
                    vars(parameter)["grad_sample"] = torch.where(chosen, found, 0.0)
        return loss.detach(), norms

    def _sum(self, factors: Tensor) -> Tensor:
        """(P,), the block's gradients times (BLOCK,) factors; 0 for a parameter without gradient."""
        parts = []
        for parameter in self._parameters:
            found = vars(parameter).get("grad_sample")
            part = torch.zeros_like(parameter) if found is None else torch.einsum("i,i...", factors, found)
            parts.append(part.reshape(-1))
        return torch.cat(parts)

    def _measure_norms(self) -> Tensor:
        """(B,) of the gradients that the hooks have just seen, over all parameters together."""
        seen = [vars(parameter).get("grad_sample") for parameter in self._parameters]
        return _compute_norms([part.reshape(len(part), -1) for part in seen if part is not None])

    def _compute_losses(self, indices: Tensor, losses: Losses) -> Tensor:
        """(indices,) losses with their graph."""
        loss = losses(indices)
        if loss.shape != indices.shape:
            raise PrivacyError(
                f"per-sample losses have shape {tuple(loss.shape)} for {len(indices)} samples; "
                "DP-SGD needs one loss for each sample, not their mean"
            )
        return loss

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            vars(parameter).update(grad_sample=None)
            parameter.grad = None


def _compute_norms(parts: Sequence[Tensor]) -> Tensor:
    """(B,) float64 norms of rows (B, ...) over all parts together; infinite from LARGEST_NORM on.

    Float32 measures the gradient of a large layer too short, so that one sample could move the sum by more
    than the clip norm.
    """
    # a whole layer in float64 would leave the processor's cache, and take six times as long
    pieces = [
        piece
        for part in parts
        for piece in (part.split(1 << 13, dim=1) if part.device.type == "cpu" else [part])
    ]
    norms = torch.stack([torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64) for piece in pieces])
    norms = torch.linalg.vector_norm(norms, dim=0)
    return torch.where(norms < LARGEST_NORM, norms, torch.inf)


@contextmanager
def _silence_remarks() -> Iterator[None]:
    """Silence PyTorch's warning that Opacus hooks the first layer, whose input needs no gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _is_fixed(module: nn.Module) -> bool:
    """Frozen, and in evaluation mode: it treats each sample alone, and nothing of it is sent."""
    own = list(module.parameters())
    return bool(own) and not module.training and not any(parameter.requires_grad for parameter in own)


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raises PrivacyError naming the layers that mix the samples of a batch, and what to use instead."""
    mixing = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not _is_fixed(module)
    ]
    if mixing:
        raise PrivacyError(
            f"BatchNorm in {', '.join(mixing)}: it normalises each sample with the others of its batch, so "
            "there is no gradient of one sample to clip, and its running statistics would leave without "
            "noise. Use norm: group (GroupNorm) in the model"
        )
