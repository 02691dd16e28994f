"""The first layers of VGG-11, which can tell sites apart in place of the model that they train.

FedPerC (Yang et al. 2022, doi 10.18293/SEKE2022-100) takes sparsity vectors from a VGG-11 (Simonyan and
Zisserman 2015, arXiv 1409.1556) and does not say what its weights are.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.foundation.torchvision_import import torchvision
from perennial.models.initialisation import seeded_initialisation

COLOURS = 3
FEATURES = "features."
"""What torchvision puts before the names of the convolutions' tensors."""


class VggFront(nn.Module):
    """The convolutions of VGG-11 up to and including the ReLU with number `layers`.

    Inputs are (B, 1 or 3, H, W); a grey image is repeated in three equal channels.
    """

    def __init__(self, layers: int, input_shape: tuple[int, ...]) -> None:
        """Draw weights from PyTorch's global generator, as torchvision does; vgg11_front seeds it."""
        super().__init__()
        vgg = torchvision().models.vgg
        everything = vgg.make_layers(vgg.cfgs["A"], batch_norm=False)
        relus = [place for place, module in enumerate(everything) if isinstance(module, nn.ReLU)]
        if not 1 <= layers <= len(relus):
            raise ConfigError(f"strategy.layers: found {layers}; VGG-11 allows 1 to {len(relus)}")
        self.layers: nn.Sequential = everything[: relus[layers - 1] + 1]
        pools = sum(isinstance(module, nn.MaxPool2d) for module in self.layers)
        if len(input_shape) != 3 or input_shape[0] not in (1, COLOURS) or min(input_shape[1:]) < 2**pools:
            raise ConfigError(
                f"strategy.extractor: found inputs of shape {tuple(input_shape)}; {layers} layers of VGG-11 "
                f"allow images of 1 or {COLOURS} channels and at least {2**pools} pixels a side"
            )
        for module in self.layers:
            if isinstance(module, nn.ReLU):
                module.inplace = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.expand(-1, COLOURS, -1, -1))


def vgg11_front(layers: int, input_shape: tuple[int, ...], seed: int) -> VggFront:
    """A VggFront with seeded weights, in evaluation mode. Raises ConfigError if inputs do not suit it."""
    with seeded_initialisation(seed, "vgg11"):
        return VggFront(layers, input_shape).eval()


def read_vgg11(path: Path) -> dict[str, Tensor]:
    """Read the convolutions of torchvision's VGG-11 from a safetensors file, by the names of VggFront.

    Raises ConfigError when the file cannot be read.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"strategy.extractor: {path}: found {error}; allowed: a safetensors file of torchvision's vgg11"
        ) from error
    return {
        f"layers.{name.removeprefix(FEATURES)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(FEATURES)
    }


def with_weights(front: VggFront, tensors: dict[str, Tensor]) -> VggFront:
    """Load tensors into `front` and return it. Raises ConfigError naming one that is missing or wrong."""
    for name, parameter in front.state_dict().items():
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        if found != tuple(parameter.shape):
            raise ConfigError(
                f"strategy.extractor: {name}: found {found}, expected {tuple(parameter.shape)} of VGG-11"
            )
    front.load_state_dict({name: tensors[name] for name in front.state_dict()})
    return front
