"""`features: auto`: the maps that fit the data's kind and shape, written into an experiment as it is read."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from perennial.config.schema import ExperimentFields
from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import PACKAGES

WIDEST_INPUTS = 1100
"""Values of an image up to which they are features themselves; the sums grow with their square."""
WIDEST_ROW = 5000
"""The same of a table's row, half of whose values say whether a number is missing."""
WIDEST_PAIRED = 44
"""Values of a row up to which products of each two are tried: about a thousand."""
PATCHES_SIDE = 32
"""Pixels along the longer side of what patches look at."""
LEAST_SIDE = 8
"""Pixels below which patches of an image do not fit their grid."""
NETWORK = "efficientnet_lite0"
NETWORK_SIDES = (96, 128)
"""Pixels at which the network of photographs reads small and larger images."""


def choose_maps(shape: tuple[int, ...], stored: str, *, network: bool, chooses: bool = True) -> list[Any]:
    """The feature maps that suit samples of this shape, (C, H, W) or (D,), stored as uint8 or float32.

    network: whether the network of photographs is installed. chooses: whether there are validation samples,
    by which alone a table's wider map can be chosen.
    """
    values = 1
    for side in shape:
        values *= side
    if len(shape) == 1:
        if values > WIDEST_ROW:
            return [{"name": "random", "width": 1000}]
        paired = chooses and values <= WIDEST_PAIRED
        return [{"name": "inputs", "keep_length": True}, *[{"name": "pairs"}] * paired]
    raw: list[dict[str, Any]] = [{"name": "inputs"}] if values <= WIDEST_INPUTS else []
    catches: list[dict[str, Any]] = [{"name": "random", "width": 1000}]
    if (
        len(shape) != 3
        or stored != "uint8"
        or min(_shrink_shape(shape)) < LEAST_SIDE
        or shape[0] not in (1, 3)
    ):
        return raw + catches
    height, width = sides = _shrink_shape(shape)
    turned = "square" if height == width else "rectangle"
    patches: dict[str, Any] = {"name": "patches", "filters": 100, "image_size": [*sides]}
    symmetries = [patches, *(patches | {"symmetry": symmetry} for symmetry in ("mirror", turned))]
    of_photographs: list[dict[str, Any]] = []
    if network and shape[0] == 3:
        side = NETWORK_SIDES[max(shape[1:]) > NETWORK_SIDES[0]]
        of_photographs = [{"name": "pretrained", "network": NETWORK, "image_size": side}]
    return [*of_photographs, symmetries, *(raw or catches)]


def has_network() -> bool:
    """Whether the network of photographs and its weights are installed."""
    return all(find_spec(name) is not None for name in ("timm", PACKAGES[NETWORK].module))


def _shrink_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(H, W) of what patches look at."""
    scale = min(1.0, PATCHES_SIDE / max(shape[1:]))
    return round(shape[1] * scale), round(shape[2] * scale)


Checked = TypeVar("Checked", bound=ExperimentFields)


def replace_auto_maps(
    content: dict[str, Any], where: str, read: Callable[[dict[str, Any]], Checked]
) -> Checked:
    """The experiment with feature maps chosen for its data in place of `features: auto`.

    content: of its file, named `where` in errors. read: validates such content. Raises ConfigError where it
    is faulty, or with privacy, under which validation samples may not choose.
    """
    # here, because they take PyTorch, which `perennial --help` does without
    from perennial.config.simulation import as_for, load_simulated_federation
    from perennial.data.deployed import derive_input_shape

    model = dict(content["model"])
    privacy = content.get("privacy")
    if isinstance(privacy, dict) and privacy.get("mode", "none") != "none":
        raise ConfigError(
            f"{where}: model.features: found auto with privacy, where the counts of validation samples that "
            "choose would be a release of their own; write the maps out, as [inputs] or those that "
            "`perennial init DATA --epsilon E` writes"
        )
    # the shape of the data does not depend on the maps; these stand in until it is known
    draft = read(content | {"model": model | {"features": ["inputs"]}})
    data = draft.data
    if data.only_at_sites or (data.source == "folder" and data.size is not None and data.color is not None):
        shape, stored = derive_input_shape(data), "float32" if data.source == "csv" else "uint8"
    else:
        federation = load_simulated_federation(draft)
        shape, stored = federation.input_shape, federation.stored
    model["features"] = choose_maps(
        shape, stored, network=has_network(), chooses=draft.data.validation_fraction > 0
    )
    return as_for(read(content | {"model": model}), draft)
