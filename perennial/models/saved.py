"""The model of a finished run: one file holds everything that predictions need."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from perennial.foundation.errors import StateError, clean_text, suggest_nearest
from perennial.foundation.files import replace_file
from perennial.foundation.plain import PlainObject, read_object
from perennial.foundation.tensor_file import yield_pieces
from perennial.models.class_means import CLASS_MEANS, build_nearest_mean
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import IncrementalModel, load_complete


class _Stored(BaseModel):
    """A JSON object of a model file's metadata; later releases may have written further keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _StoredInputs(_Stored):
    shape: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(min_length=1, max_length=3)
    stored: Literal["uint8", "float32"] | None = None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    columns: dict[str, str | list[str]] | None = None
    fill: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> "_StoredInputs":
        lengths = {len(values) for values in (self.mean, self.std, self.fill) if values is not None}
        if lengths != {self.shape[0]}:
            raise ValueError(f"mean, std: found {sorted(lengths)} values, allowed {self.shape[0]}")
        return self


Point = tuple[float, float] | tuple[float, float, Literal["sensitivity"]]


class _StoredConfidence(_Stored):
    temperature: float | None = None
    coverage: float | None = None
    thresholds: tuple[float | None, ...] | None = None
    void: str = ""
    points: dict[str, Point] = Field(default_factory=dict)


class _StoredSettings(_Stored):
    """What of an experiment decides the layers of its model."""

    model: ModelConfig
    seed: int = Field(ge=0)


_CLASSES: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])

NOT_STORED = 2**25
"""Numbers that may be built beside four times the file's: fixed parts follow from the seed, in no file,
and a layer is built more than once on the way to its values."""

GLOBAL_MODEL = "model.safetensors"
"""In a run's folder."""
PERSONAL_MODEL = "personal_model.safetensors"
"""In a site's state folder."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model. shape: (C, H, W) of an image, (D,) of a row.

    stored: uint8 if the data are 8-bit pixels, float32 if they are numbers in a scale of their own.
    mean, std: (C,) or (D,) float32 of (x - mean) / std, after 8-bit images are scaled to 0..1.
    columns: of a table, feature column -> "numeric", "date" or its categories, in the D features' order.
    fill: (D,) replaces missing numbers of a table; None: the mean does.
    """

    shape: tuple[int, ...]
    stored: Literal["uint8", "float32"]
    mean: Tensor
    std: Tensor
    columns: Mapping[str, str | Sequence[str]] | None = None
    fill: Tensor | None = None

    @property
    def filling(self) -> Tensor:
        """(D,) The values that replace missing numbers."""
        return self.mean if self.fill is None else self.fill

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; from_json reads them."""
        return {
            "shape": self.shape,
            "stored": self.stored,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "columns": self.columns,
            **({} if self.fill is None else {"fill": self.fill.tolist()}),
        }

    @classmethod
    def from_json(cls, content: PlainObject) -> "Inputs":
        """The inverse of to_json. Raises ValueError naming the key that is missing or wrong."""
        found = _StoredInputs.model_validate(content)
        # files from before the key was written: of all sources, only generated ones held images as floats
        stored = found.stored or ("uint8" if len(found.shape) == 3 else "float32")
        mean, std = (torch.tensor(values, dtype=torch.float32) for values in (found.mean, found.std))
        fill = None if found.fill is None else torch.tensor(found.fill, dtype=torch.float32)
        return cls(found.shape, stored, mean, std, found.columns, fill)


@dataclass(frozen=True)
class Confidence:
    """Results of calibration. temperature: divides logits; None: nobody fitted one.

    thresholds: the least log odds of a probability, after temperature scaling, with which each class is in a
    prediction set that holds the true class with probability coverage; -inf: always. None without calibration
    samples. In files always is null.
    void: why that coverage is not guaranteed, or ''.
    points: class -> (share asked for, least log odds at which the class is reported with it), and
    "sensitivity" where the share is not the specificity.
    """

    temperature: float | None = None
    coverage: float | None = None
    thresholds: tuple[float, ...] | None = None
    void: str = ""
    points: Mapping[str, Point] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: PlainObject) -> "Confidence":
        """Build it from the fields; missing ones are unknown. Raises ValueError for a wrong one."""
        found = _StoredConfidence.model_validate(content)
        thresholds = found.thresholds
        return cls(
            found.temperature,
            found.coverage,
            None if thresholds is None else tuple(-math.inf if t is None else t for t in thresholds),
            found.void,
            found.points,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; from_json reads them."""
        always = (
            None if self.thresholds is None else [t if math.isfinite(t) else None for t in self.thresholds]
        )
        return {**asdict(self), "thresholds": always}


@dataclass(frozen=True)
class SavedModel:
    """A model that was read from a file, with all that is needed to use it.

    model: in evaluation mode.
    classes: names by label.
    settings: the experiment, as a mapping.
    class_means: (M, d) rows of unit length, zero for a class that nobody had exemplars of; None: by
    the model's own head.
    confidence: how stated probabilities and prediction sets were calibrated.
    """

    model: IncrementalModel
    classes: tuple[str, ...]
    inputs: Inputs
    settings: PlainObject
    class_means: Tensor | None = None
    confidence: Confidence = Confidence()

    @property
    def classifier(self) -> nn.Module:
        """The module that turns inputs (B, ...) into logits (B, M), as the experiment judged the model.

        It is the model with its head, or what takes the head's place if the file holds that.
        """
        return self.model if self.class_means is None else build_nearest_mean(self.model, self.class_means)

    @property
    def classifier_name(self) -> str:
        """The classifier as learner.classifier names it: head or nearest_mean."""
        return "head" if self.class_means is None else "nearest_mean"


def save_model(
    path: Path,
    tensors: Mapping[str, Tensor],
    inputs: Inputs,
    classes: Sequence[str],
    experiment: str,
    class_means: Tensor | None = None,
    confidence: Mapping[str, Any] | None = None,
) -> None:
    """Write a complete model to a file, whole or not at all, with mode 0600.

    The same model gives the same bytes. experiment: as JSON.
    class_means: as in SavedModel.
    confidence: fields of Confidence.
    """
    metadata = {
        "experiment": experiment,
        "classes": json.dumps(classes),
        "inputs": json.dumps(inputs.to_json()),
        **({"confidence": json.dumps(confidence, sort_keys=True)} if confidence else {}),
    }
    means = {} if class_means is None else {CLASS_MEANS: class_means}
    replace_file(path, yield_pieces({**tensors, **means}, metadata))


def load_saved(path: Path) -> SavedModel:
    """Load a model.safetensors. Raises StateError naming the file if missing, damaged or incomplete."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        settings = read_object(metadata["experiment"])
        found = _StoredSettings.model_validate(settings)
        classes = _CLASSES.validate_json(metadata["classes"])
        inputs = Inputs.from_json(read_object(metadata["inputs"]))
        confidence = Confidence.from_json(read_object(metadata.get("confidence", "{}")))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        said = clean_text(str(error), 500)
        raise StateError(f"{path}: missing, damaged or not the model of a finished run ({said})") from error
    with _limit_size(4 * sum(tensor.numel() for tensor in tensors.values()) + NOT_STORED, path):
        model = build_model(found.model, inputs.shape, len(classes), found.seed, with_weights=False)
    means, expected = tensors.pop(CLASS_MEANS, None), (len(classes), model.feature_width)
    if means is not None and tuple(means.shape) != expected:
        raise StateError(f"{path}: {CLASS_MEANS}: found {tuple(means.shape)}, allowed {expected}")
    load_complete(model, tensors)
    return SavedModel(model.eval(), classes, inputs, settings, means, confidence)


@contextmanager
def _limit_size(most: int, path: Path) -> Iterator[None]:
    """Context manager: end what this thread builds as soon as its modules hold more numbers.

    A file's metadata can describe a network of any size; what does not fit the file's tensors is refused
    before it fills the memory. Raises StateError naming path.
    """
    thread, built = get_ident(), 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal built
        if tensor is not None and get_ident() == thread:
            built += tensor.numel()
            if built > most:
                raise StateError(
                    f"{path}: its metadata describe a model of more than {most} numbers, which the tensors "
                    "in it do not fill; it is damaged, or not the model of a finished run"
                )

    with register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count):
        yield


def find_model_file(folder: Path, site: str) -> Path:
    """Path of the model to use: of `site` in a run's folder, or for site '' the folder's own model.

    folder: of a run, or a real site's state folder, which holds its own model alone.
    Raises StateError when the site has no model of its own there.
    """
    if site:
        path = folder / "sites" / site / PERSONAL_MODEL
        if not path.exists():
            found = [other.parent.name for other in folder.glob(f"sites/*/{PERSONAL_MODEL}")]
            raise StateError(
                f"{path}: missing; {len(found)} sites have their own "
                f"model{suggest_nearest(site, found)}, which a "
                "strategy that personalises makes at the end of a task"
            )
        return path
    own = folder / PERSONAL_MODEL
    return own if own.exists() else folder / GLOBAL_MODEL
