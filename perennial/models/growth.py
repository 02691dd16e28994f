"""Vectors of a model's shape that outlive a task, such as control variates, when the model grows."""

from collections.abc import Mapping

from torch import Tensor

from perennial.foundation.errors import StateError


def grown(old: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`old` in the shapes of `template`, with template's values for rows and tensors that old lacks.

    Tensors that template does not name are left out. The result shares no memory with either, and lies on
    template's device. Raises StateError naming the tensor that has more rows than template, or rows of
    another shape.
    """
    result: dict[str, Tensor] = {}
    for name, fresh in template.items():
        result[name] = fresh.detach().clone()
        if name not in old:
            continue
        kept = old[name]
        fits = kept.dim() == fresh.dim() and kept.shape[1:] == fresh.shape[1:]
        if not fits or (kept.dim() > 0 and len(kept) > len(fresh)):
            raise StateError(
                f"tensor {name!r}: kept as {tuple(kept.shape)}, which cannot grow to {tuple(fresh.shape)}"
            )
        if kept.dim() == 0:
            result[name].copy_(kept)
        else:
            result[name][: len(kept)].copy_(kept)
    return result
