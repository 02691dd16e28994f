"""Moving a tensor to a device without stopping what the device does."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def to_device(tensor: "torch.Tensor", place: "torch.device") -> "torch.Tensor":
    """The tensor on a device; a copy from CPU to GPU does not wait for the GPU.

    From ordinary memory the driver would first wait until the GPU has nothing to do; from pinned memory it
    does not.
    """
    if place.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(place, non_blocking=True)
    return tensor.to(place)
