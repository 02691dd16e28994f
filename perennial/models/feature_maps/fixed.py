"""The backbone of a model whose features nobody trains: one or more maps side by side, on the exact grid.

Shapes: x (B, ...) normalised inputs, as every model takes them; features (B, d) multiples of 2^-16 of length
1/sqrt(2). Each map's own features have length 1 before they are joined, so that none outweighs another.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import product

import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import (
    PACKAGES,
    Alternative,
    FeatureMapConfig,
    InputsConfig,
    PairsConfig,
    PatchesConfig,
    PretrainedConfig,
    RandomMapConfig,
    as_sides,
    name_choices,
)
from perennial.models.feature_maps.patches import Patches, Symmetric, draw_filters
from perennial.models.feature_maps.pixels import Constants, Inputs, Pairs, Pixels, RandomReLU
from perennial.models.feature_maps.pretrained import fold
from perennial.models.feature_maps.projection import (
    Projection,
    build_projection,
    hash_content,
    normalise_rows,
    round_to_grid,
)


class FixedFeatures(nn.Module):
    """A backbone that is never trained: fixed networks whose features stand side by side.

    maps: networks (B, ...) -> (B, width) over inputs, or over stored values, which `pixels` restores.
    """

    def __init__(
        self,
        maps: Sequence[nn.Module],
        pixels: Pixels,
        facts: list[dict[str, str]],
        projection: Projection | None = None,
        slots: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """facts: of each map, what a person should know.

        slots: indices of the maps among which each choice is made; None: every map is used.
        """
        super().__init__()
        self.slots = [(place,) for place in range(len(maps))] if slots is None else [*map(tuple, slots)]
        self.selection: tuple[int, ...] | None = None
        """The maps that are looked at; None: all."""
        self.projection = projection
        self.maps, self.pixels, self.facts = nn.ModuleList(maps), pixels, facts
        self.mapped_width = sum(int(module.width) for module in maps)  # pyright: ignore
        self.width = self.mapped_width if projection is None else projection.width
        self.requires_grad_(False)

    @property
    def parts(self) -> tuple[list[int], list[str]]:
        """(number of features of each map used, its name); one part "all" if something mixes the maps."""
        if self.projection is not None:
            return [self.width], ["all"]
        widths, names = self.widths, [fact.get("map", "?") for fact in self.facts_of_seen]
        return [widths[place] for place in self.selection or range(len(widths))], names

    @property
    def of_rows(self) -> bool:
        """Whether samples are rows of numbers, and no images."""
        return self.pixels.mean.ndim == 1

    @property
    def fillers(self) -> list[int]:
        """Indices, among the features, of those that give rows one length and say nothing for themselves."""
        found, start = list[int](), 0
        for place in self.selection or range(len(self.maps)):
            module = self.maps[place]
            start += int(module.width)  # pyright: ignore[reportArgumentType]
            found += [start - 1] * (isinstance(module, Inputs) and module.keep_length)
        return found

    @property
    def facts_of_seen(self) -> list[dict[str, str]]:
        """The facts of each map that is used."""
        return self.facts if self.selection is None else [self.facts[place] for place in self.selection]

    @property
    def widths(self) -> list[int]:
        """Number of features of each map."""
        return [int(module.width) for module in self.maps]  # pyright: ignore[reportArgumentType]

    @property
    def alternatives(self) -> list[list[int]]:
        """For each choice that is still to be made, the indices of its maps."""
        return [[*slot] for slot in self.slots if len(slot) > 1]

    @property
    def widest(self) -> int:
        """The largest number of features that any choice of maps gives."""
        if not self.alternatives:
            return self.width
        return sum(max(self.widths[place] for place in slot) for slot in self.slots)

    def select_maps(self, selection: Sequence[int]) -> "FixedFeatures":
        """A copy that uses the maps of these indices alone, with features of length 1/sqrt(2) again."""
        found = copy(self)
        found.selection = tuple(selection)
        found.width = len(self.locate_selected(selection))
        return found

    def locate_selected(self, selection: Sequence[int]) -> Tensor:
        """Indices, among the features of all maps, of the features of the selected maps."""
        return locate_maps(self.widths, selection)

    def find_by_content(self, content: str) -> "FixedFeatures | None":
        """The features with this content hash, of all maps or of a selection of them; None if none has it."""
        if not self.alternatives:
            return self if self.content == content else None
        alone = ((place,) for slot in self.alternatives for place in slot)
        for selection in (*alone, *product(*self.slots)):
            if (found := self.select_maps(selection)).content == content:
                return found
        return None

    def map_inputs(self, x: Tensor) -> Tensor:
        """(B, sum of widths) features of all maps side by side, each map's of length 1."""
        pixels: Tensor | None = None
        parts = []
        for module in self.maps:
            if isinstance(module, RandomReLU | Pairs) or (isinstance(module, Inputs) and x.ndim == 2):
                parts.append(normalise_rows(module(x)))
            else:
                pixels = self.pixels(x) if pixels is None else pixels
                parts.append(normalise_rows(module(pixels)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def finished(self, mapped: Tensor) -> Tensor:
        """(B, width) final features on the grid, from what mapped() gives."""
        if self.selection is not None:
            return round_to_grid(mapped[:, self.locate_selected(self.selection).to(mapped.device)])
        if self.projection is not None:
            return round_to_grid(self.projection(mapped))
        return round_to_grid(mapped)

    def forward(self, x: Tensor) -> Tensor:
        return self.finished(self.map_inputs(x))

    def train(self, mode: bool = True) -> "FixedFeatures":
        """Stay in evaluation mode: nothing in it may depend on the batch."""
        return super().train(False)

    @property
    def content(self) -> str:
        """SHA-256 of everything but the machine that a sample's features depend on."""
        behind = [] if self.projection is None else [self.projection]
        seen = self.maps if self.selection is None else [self.maps[place] for place in self.selection]
        parts = [*seen, self.pixels, *behind]
        # the first part is as earlier releases wrote it, which kept features beside an expansion
        return hash_content([("keep False", {}), *map(_describe_map, parts)])

    def hash_maps(self, constants: str) -> str:
        """SHA-256 of what mapped() depends on, beside the stored sample. constants: hash of mean and std."""
        return hash_content([(constants, {}), *map(_describe_map, [*self.maps, self.pixels])])

    @property
    def costly(self) -> bool:
        """Whether computing features takes longer than reading them from disk."""
        return not all(isinstance(module, RandomReLU | Inputs | Pairs) for module in self.maps)


def locate_maps(widths: Sequence[int], selection: Sequence[int]) -> Tensor:
    """Indices of the selected maps' features among those of all maps, which have these widths."""
    starts = [sum(widths[:place]) for place in range(len(widths))]
    return torch.cat([torch.arange(starts[m], starts[m] + widths[m]) for m in selection])


def _describe_map(module: nn.Module) -> tuple[str, Mapping[str, Tensor]]:
    return str(module.about), module.state_dict()


def build_fixed_features(
    features: Sequence[FeatureMapConfig],
    input_shape: tuple[int, ...],
    constants: Constants | None,
    *,
    projection: int | None = None,
    with_weights: bool = True,
) -> FixedFeatures:
    """Build the fixed feature maps of an experiment.

    constants: mean and std of the inputs. with_weights: False: a saved model fills them in later.
    Raises ConfigError naming the key when a map cannot read such inputs.
    """
    maps: list[nn.Module] = []
    facts: list[dict[str, str]] = []
    slots: list[range] = []
    listed: list[tuple[Alternative, str]] = []
    for found in features:
        before = len(listed)
        if isinstance(found, tuple):
            listed += zip(found, name_choices(found), strict=True)
        else:
            listed.append((found, found.name))
        slots.append(range(before, len(listed)))
    for config, name in listed:
        for_tables = isinstance(config, RandomMapConfig | InputsConfig | PairsConfig)
        if not for_tables and len(input_shape) != 3:
            raise ConfigError(
                f"model.features: found {config.name!r}, which reads images (channels, height, width), but "
                f"the data has shape {input_shape}; allowed for tables: random, inputs, pairs"
            )
        if isinstance(config, PairsConfig) and len(input_shape) != 1:
            raise ConfigError(
                f"model.features: found 'pairs', which reads rows, but the data has shape {input_shape}"
            )
        module, fact = _build(config, input_shape, with_weights)
        maps.append(module)
        facts.append({"map": name, **fact})
    projected = None if projection is None else build_projection(projection, maps, input_shape, with_weights)
    return FixedFeatures(maps, Pixels(input_shape, constants), facts, projected, slots).eval()


def _build(
    config: Alternative,
    shape: tuple[int, ...],
    with_weights: bool,
) -> tuple[nn.Module, dict[str, str]]:
    if isinstance(config, InputsConfig):
        if config.keep_length and len(shape) != 1:
            raise ConfigError("model.features: inputs: keep_length is for rows; found images")
        return Inputs(shape, config.keep_length), {"weights": "none"}
    if isinstance(config, PairsConfig):
        return Pairs(shape), {"weights": "none"}
    if isinstance(config, RandomMapConfig):
        return RandomReLU(config.width, shape), {"weights": "drawn from a public seed"}
    if isinstance(config, PatchesConfig):
        sides = as_sides(config.image_size)
        height, width = sides or shape[1:]
        cells = min(height, width) - config.size + 1
        if cells < config.grid:
            raise ConfigError(
                f"model.features: patches of size {config.size} fit {max(cells, 0)} times along images of "
                f"{height}x{width} pixels; allowed {config.grid} (grid) or more: a smaller size or grid"
            )
        filters = draw_filters(config.filters, config.size, shape[0])
        taken = "patches of two public photographs (CC BY 2.0), drawn from a public seed"
        patches = Patches(filters, config.grid, sides, config.power)
        return _build_symmetric(patches, config, (height, width)), {"weights": taken}
    from perennial.models.feature_maps.pretrained import build_pretrained

    network, facts = build_pretrained(config, shape, with_weights)
    if config.network in PACKAGES:
        fold(network)
    return _build_symmetric(network, config, as_sides(config.image_size) or shape[1:]), facts


def _build_symmetric(
    module: nn.Module, config: PatchesConfig | PretrainedConfig, sides: tuple[int, ...]
) -> nn.Module:
    """The map over the symmetric images that its config names. sides: (H, W) of what it looks at."""
    if config.symmetry is None:
        return module
    if config.symmetry == "square" and sides[0] != sides[1]:
        raise ConfigError(
            f"model.features: {config.name}: symmetry: found 'square', which turns images by a quarter, but "
            f"they are {sides[0]}x{sides[1]}; allowed: mirror, rectangle, or an image_size of equal sides"
        )
    return Symmetric(module, config.symmetry)
