"""DP-SGD inside a site: one private gradient for each Poisson batch, made with Opacus.

Opacus takes the gradient of each sample, measures it and clips it; the noise comes from our source, once on
the whole flat gradient, because Opacus's own secure mode needs a package that no longer builds. The learner
keeps its model, optimizer and loop: it asks for a gradient where it would have called backward().

Shapes: B samples in the Poisson batch, P trainable parameters.

Abadi et al. 2016 (arXiv 1607.00133).
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from perennial.foundation.devices import to_device
from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise, add_noise

MOST_AT_ONCE = 4096
"""Samples whose gradients are held at once: a Poisson batch has no upper limit."""
Losses = Callable[[Tensor], Tensor]
"""(indices,) int64 in a batch -> (indices,) losses."""


def poisson_batches(samples: int, sample_rate: float, steps: int, source: Noise) -> Iterator[Tensor]:
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
                private.compute(len(batch), lambda rows: losses(x[batch[rows]], y[batch[rows]]))
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
        on_processor = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._looks = on_processor
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
        for parameter in self._parameters:
            vars(parameter).pop("summed_grad", None)

    def compute(self, batch: int, losses: Losses, patients: Tensor | None = None) -> Tensor:
        """Set the private gradient of one Poisson batch; returns its mean loss (private; nan when empty).

        The mean is a float64 number on the device, so that nobody waits for it. batch: B, 0 allowed. losses:
        takes indices in the batch and returns their losses, each depending on its own sample alone; a batch
        above MOST_AT_ONCE is taken in parts. patients: (B,) int64, patient number of each sample; then the
        sum of a patient's gradients is clipped, and a part holds whole patients. A parameter that already has
        a .grad keeps its memory, so a flat gradient vector stays one.
        Raises PrivacyError on losses of another shape, or a model in evaluation mode, which Opacus does not
        watch.
        """
        if not self._model.training:
            raise PrivacyError("the model is in evaluation mode, in which Opacus sees no per-sample gradient")
        sizes = [parameter.numel() for parameter in self._parameters]
        homes = [parameter.grad for parameter in self._parameters]
        vector = torch.zeros(sum(sizes), device=self._parameters[0].device)
        try:
            self._forget_gradients()
            loss = self._add_parts(vector, batch, losses, patients)
            add_noise(vector, self._noise_multiplier * self._clip_norm, self._source)
            vector /= self._expected_batch
        finally:
            self._forget_gradients()
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.grad = home
        for parameter, part in zip(self._parameters, vector.split(sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter)
            else:
                parameter.grad.copy_(part.view_as(parameter))
        return loss / batch if batch else torch.full_like(loss, math.nan)

    def clipped_norms(self, batch: int, losses: Losses) -> Tensor:
        """(B,) L2 norms of the samples' clipped gradients: how far each sample moves the sum.

        The norms are private. The model's gradients stay as they were. Arguments as in compute.
        """
        homes = [parameter.grad for parameter in self._parameters]
        try:
            self._forget_gradients()
            norms = []
            with _without_remarks():
                for indices in self._parts(batch):
                    self._losses_of(indices, losses).sum().backward()
                    found = self._norms()
                    norms.append(torch.where(found.isfinite(), found.clamp(max=self._clip_norm), 0.0))
                    self._forget_gradients()
        finally:
            self._forget_gradients()
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.grad = home
        return torch.cat(norms)

    def _norms(self) -> Tensor:
        """(B,) of the gradients that the hooks have just seen, over all parameters together."""
        seen = [vars(parameter).get("grad_sample") for parameter in self._parameters]
        norms = [part.flatten(1).norm(dim=1) if part.ndim > 1 else part for part in seen if part is not None]
        return torch.stack(norms).norm(dim=0)

    def _parts(self, batch: int) -> Iterator[Tensor]:
        """Places in the batch, as many at a time as fit."""
        yield from torch.arange(batch).split(MOST_AT_ONCE) if batch else ()

    def _losses_of(self, indices: Tensor, losses: Losses) -> Tensor:
        """(indices,) losses with their graph."""
        loss = losses(indices)
        if loss.shape != indices.shape:
            raise PrivacyError(
                f"per-sample losses have shape {tuple(loss.shape)} for {len(indices)} samples; "
                "DP-SGD needs one loss for each sample, not their mean"
            )
        return loss

    def _add_parts(self, vector: Tensor, batch: int, losses: Losses, patients: Tensor | None) -> Tensor:
        """Add the clipped gradients of the batch to vector, part by part; returns the sum of the losses."""
        total = torch.zeros((), device=vector.device)
        with _without_remarks():
            for indices in self._parts(batch) if patients is None else self._whole_patients(patients):
                if patients is not None:
                    total += self._add_patients(vector, indices, losses, patients[indices])
                    continue
                taken = self._finite_losses if self._looks else self._masked_losses
                loss = taken(indices, losses)
                if loss is not None:
                    total += loss.detach().sum()
                    vector += self._clipped_sum(loss)
                self._forget_gradients()
        return total.double()

    def _whole_patients(self, patients: Tensor) -> Iterator[Tensor]:
        """Places in the batch, patient by patient, as many at a time as fit; a larger patient comes alone."""
        order = torch.argsort(patients, stable=True)
        sizes = torch.unique_consecutive(patients[order], return_counts=True)[1].tolist()
        part: list[Tensor] = []
        held = 0
        for members in order.split(sizes):
            if part and held + len(members) > MOST_AT_ONCE:
                yield torch.cat(part)
                part, held = [], 0
            part.append(members)
            held += len(members)
        if part:
            yield torch.cat(part)

    def _add_patients(self, vector: Tensor, indices: Tensor, losses: Losses, patients: Tensor) -> Tensor:
        """Add the clipped sum of each patient's gradients; a patient whose sum is not finite counts as 0."""
        loss = self._losses_of(indices, losses)
        loss.sum().backward()
        present, whose = torch.unique(patients, return_inverse=True)
        whose = to_device(whose, vector.device)
        sums = torch.zeros(len(present), len(vector), device=vector.device)
        for start, parameter in zip(self._starts(), self._parameters, strict=True):
            found = vars(parameter).get("grad_sample")
            if found is not None:
                sums[:, start : start + parameter.numel()].index_add_(0, whose, found.flatten(1))
        norms = sums.norm(dim=1)
        finite = norms.isfinite()
        factors = (self._clip_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
        vector += torch.where(finite[:, None], sums * factors[:, None], 0.0).sum(dim=0)
        self._forget_gradients()
        return loss.detach().sum()

    def _starts(self) -> list[int]:
        """Where each parameter begins in the flat gradient."""
        return [0, *accumulate(parameter.numel() for parameter in self._parameters)][:-1]

    def _finite_losses(self, indices: Tensor, losses: Losses) -> Tensor | None:
        """The losses of the samples whose gradients are finite, after backward(); None where no sample is.

        The others are left out of a second pass: what a factor of 0 makes of an infinite gradient is no 0.
        """
        while len(indices):
            loss = self._losses_of(indices, losses)
            loss.sum().backward()
            finite = self._norms().isfinite().cpu()
            if bool(finite.all()):
                return loss
            self._forget_gradients()
            indices = indices[finite]
        return None

    def _masked_losses(self, indices: Tensor, losses: Losses) -> Tensor:
        """The losses after backward(); a sample whose gradient is not finite has loss and gradient 0."""
        loss = self._losses_of(indices, losses)
        loss.sum().backward()
        finite = self._norms().isfinite()
        for parameter in self._parameters:
            found = vars(parameter).get("grad_sample")
            if found is not None:
                chosen = finite.view(-1, *[1] * (found.ndim - 1))
                vars(parameter)["grad_sample"] = torch.where(chosen, found, 0.0)
        return torch.where(finite, loss.detach(), 0.0)

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            vars(parameter).update(grad_sample=None, summed_grad=None)
            parameter.grad = None

    def _clipped_sum(self, loss: Tensor) -> Tensor:
        """(P,), the sum of the clipped gradients after backward().

        A parameter that the loss does not use gets 0.
        """
        gradients = self._direct_sums()
        return torch.cat(
            [
                (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
                for parameter, gradient in zip(self._parameters, gradients, strict=True)
            ]
        )

    def _direct_sums(self) -> list[Tensor | None]:
        from opacus.optimizers import DPOptimizer

        used = [parameter for parameter in self._parameters if vars(parameter)["grad_sample"] is not None]
        # Opacus keeps its clipping in an optimizer. This one clips; it never steps and adds no noise.
        clipper = DPOptimizer(
            torch.optim.SGD(used, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=self._clip_norm,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        clipper.clip_and_accumulate()
        return [vars(parameter).get("summed_grad") for parameter in self._parameters]


@contextmanager
def _without_remarks() -> Iterator[None]:
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
