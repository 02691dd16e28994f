"""The `digests` block of an experiment: what is mixed and hidden, and the network that makes it."""

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from perennial.config.yaml_file import beside, name_only
from perennial.models.config import EncoderConfig
from perennial.models.encoder_file import read_content
from perennial.privacy.digest_config import DigestConfig


class DigestsConfig(DigestConfig):
    """DigestConfig, and encoder: the fixed network whose features are mixed; its name alone, or a block."""

    encoder: Annotated[EncoderConfig, BeforeValidator(name_only)] = EncoderConfig()


def locate_encoder(digests: Any, folder: Path) -> None:
    """Make digests.encoder.file absolute, and write down its SHA-256 unless the experiment says one already.

    Raises ConfigError when the file cannot be read.
    """
    encoder = digests.get("encoder") if isinstance(digests, dict) else None
    if not isinstance(encoder, dict) or not isinstance(encoder.get("file"), str):
        return
    encoder["file"] = beside(folder, encoder["file"])
    if encoder.get("sha256") is None:
        encoder["sha256"] = hashlib.sha256(read_content(Path(encoder["file"]))).hexdigest()
