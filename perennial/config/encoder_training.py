"""The file from which an encoder of digests is trained: public data, and how long to train on it."""

from pathlib import Path

from pydantic import Field

from perennial.config.yaml_file import apply_overrides, beside, read_yaml, validate
from perennial.data.config import DataConfig
from perennial.foundation.block import Block


class EncoderTraining(Block):
    """The settings with which an encoder for digests is trained.

    data: public data. The encoder goes to every site and holds something of its training data, so use none
    that anybody wants hidden. The data must have the shape of the experiment's inputs and be normalised as
    they are.
    """

    data: DataConfig
    seed: int = Field(default=1, ge=0)
    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=64, ge=1)
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Of Adam."""


def load_encoder_training(path: Path, overrides: list[str]) -> EncoderTraining:
    """The settings in a YAML file; data.path as in an experiment.

    Raises ConfigError naming the file, each faulty key, what was found and what is allowed.
    """
    content = apply_overrides(read_yaml(path), overrides)
    data = content.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        data["path"] = beside(path.parent, data["path"])
    return validate(EncoderTraining, content, str(path))
