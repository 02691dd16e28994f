"""The trained parameters of K sites in one vector: tensor by tensor, and in each tensor site by site.

A step, a correction or a clip is one operation on the vector, and each layer's weights are one block of it
that a grouped convolution or a batched product takes as it is. Fewer sites are the first part of each block.

K: sites. T: elements of one site's trained parameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class StackedParameters:
    """Weights and gradients of K sites.

    vector, gradient: (K * T,). leaves: by name, views of vector that autograd accumulates into gradient:
    (K * rows, ...) unless keep_apart gave (K, ...). sizes: of the sites' batches in this step, and
    generators: for what is drawn in it; both are for dropout.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], count: int, like: Tensor) -> None:
        """shapes: of one site's parameters, in the order of its vector. like: has their type and device."""
        self.count = count
        self.leaves: dict[str, Tensor] = {}
        self.sizes: Sequence[int] = ()
        self.generators: Sequence[torch.Generator] = ()
        self._lengths = [shape.numel() for shape in shapes.values()]
        self._shapes = {name: (1, tuple(shape)) for name, shape in shapes.items()}
        self.vector = like.new_zeros(count * self.length)
        self.gradient = torch.zeros_like(self.vector)
        self._whole = count, self.vector, self.gradient

    @property
    def length(self) -> int:
        """T."""
        return sum(self._lengths)

    def keep_apart(self, name: str, shape: tuple[int, ...]) -> None:
        """Let a leaf have shape (K, *shape)."""
        self._shapes[name] = (0, shape)

    def settle(self) -> None:
        """Make the leaves anew, on the vector and the gradient as they are."""
        weights, gradients = self.blocks(self.vector), self.blocks(self.gradient)
        for (name, (merged, shape)), weight, gradient in zip(
            self._shapes.items(), weights, gradients, strict=True
        ):
            whole = (self.count * shape[0], *shape[1:]) if merged else (self.count, *shape)
            leaf = weight.view(whole).requires_grad_()
            leaf.grad = gradient.view(whole)
            self.leaves[name] = leaf

    def begin_again(self) -> None:
        """Hold as many sites as at first, in the same memory; the gradient is zero."""
        self.count, self.vector, self.gradient = self._whole
        self.gradient.zero_()
        self.sizes = self.generators = ()
        self.settle()

    def blocks(self, vector: Tensor) -> list[Tensor]:
        """(K, n) of each tensor, as views of vector (K * T,)."""
        parts = vector.split([self.count * length for length in self._lengths])
        return [part.view(self.count, -1) for part in parts]

    def gathered(self, rows: Tensor) -> Tensor:
        """(K, T) sites' vectors in the order of this one, (K * T,)."""
        return torch.cat([part.reshape(-1) for part in rows.split(self._lengths, dim=1)])

    def rows(self, vector: Tensor) -> Tensor:
        """(K, T), the sites' vectors; a copy."""
        return torch.cat(self.blocks(vector), dim=1)

    def load(self, rows: Tensor) -> None:
        """Take the sites' vectors, (K, T)."""
        self.vector.copy_(self.gathered(rows))

    def keep(self, count: int, beside: Sequence[Tensor]) -> list[Tensor]:
        """Go on with the first `count` sites; returns their part of other vectors (K * T,)."""

        def first(vector: Tensor) -> Tensor:
            return torch.cat([block[:count].reshape(-1) for block in self.blocks(vector)])

        self.vector, self.gradient, *others = [first(each) for each in (self.vector, self.gradient, *beside)]
        self.count = count
        self.generators = self.generators[:count]
        self.settle()
        return others

    def block(self, name: str, vector: Tensor) -> Tensor:
        """(K, n) of one tensor, as a view of vector."""
        return self.blocks(vector)[list(self._shapes).index(name)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Features (B, K * d_i) of several kinds as (B, K * sum d_i), each site's own side by side."""
        batch = len(parts[0])
        return torch.cat([part.view(batch, self.count, -1) for part in parts], dim=2).view(batch, -1)
