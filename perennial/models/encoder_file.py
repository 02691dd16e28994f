"""An encoder's weights in a file: safetensors, or the same bytes as JSON where only text may travel.

A file is known by the SHA-256 of its safetensors bytes; nothing of it is used before they are those that the
experiment was read with.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perennial.foundation.errors import ConfigError
from perennial.foundation.files import replace_file
from perennial.foundation.plain import PlainObject, read_object

if TYPE_CHECKING:
    from torch import Tensor

KEY = "digests.encoder.file"
VERSION = 1
ABOUT = "encoder"
"""The one key of a trained autoencoder's metadata, which holds JSON: safetensors writes several in any
order, and the same training is to give the same bytes."""
TEXT_SUFFIX = ".json"
TORCHVISION_LAYERS = "features."
"""What torchvision puts before the names of a network's tensors that come before the pooling."""


def read_content(path: Path) -> bytes:
    """The safetensors bytes of an encoder's file, .json or not. Raises ConfigError when it cannot be read."""
    try:
        content = path.read_bytes()
        return (
            base64.b64decode(read_object(content)["safetensors"]) if path.suffix == TEXT_SUFFIX else content
        )
    except OSError as error:
        raise ConfigError(f"{KEY}: {path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: {path}: not a file that `perennial deploy` has staged ({error})"
        ) from error


def as_text(content: bytes) -> bytes:
    """Encode safetensors bytes as the JSON that read_content reads from a .json file."""
    return json.dumps({"safetensors": base64.b64encode(content).decode()}).encode()


def content_of(path: Path, sha256: str) -> bytes:
    """The safetensors bytes in path. Raises ConfigError if their SHA-256 is not `sha256`."""
    content = read_content(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{KEY}: {path}: found an encoder with SHA-256 {found:.12}, the experiment has {sha256:.12}; "
            "the server and every site need the file that the experiment began with"
        )
    return content


def about_of(content: bytes) -> PlainObject:
    """The metadata that write_autoencoder put into a file's content; {} if there is none."""
    length = int.from_bytes(content[:8], "little")
    try:
        return read_object(read_object(content[8 : 8 + length])["__metadata__"][ABOUT])
    except (ValueError, KeyError, TypeError):
        return {}


def read_autoencoder(path: Path, sha256: str, input_shape: tuple[int, ...]) -> "dict[str, Tensor]":
    """The encoder's tensors. Raises ConfigError if the file has another hash, input shape or version."""
    content = content_of(path, sha256)
    tensors = _tensors(path, content)
    said = about_of(content)
    for key, value in {"version": VERSION, "input_shape": list(input_shape)}.items():
        if said.get(key) != value:
            raise ConfigError(
                f"{KEY}: {path}: {key}: found {said.get(key, 'nothing')}, allowed {value} here; "
                "`perennial digest train-encoder` writes one for inputs of its data's shape"
            )
    return tensors


def write_autoencoder(path: Path, tensors: "dict[str, Tensor]", about: dict[str, Any]) -> None:
    """Write an encoder for read_autoencoder. about: input_shape, and facts for whoever reads the file."""
    from safetensors.torch import save

    metadata = {ABOUT: json.dumps({"version": VERSION, **about}, sort_keys=True)}
    replace_file(path, save(tensors, metadata), mode=0o644)


def read_torchvision(path: Path, sha256: str) -> "dict[str, Tensor]":
    """The tensors of MobileNetV2's layers before the pooling, from a file with torchvision's names."""
    tensors = _tensors(path, content_of(path, sha256))
    return {
        name.removeprefix(TORCHVISION_LAYERS): tensor
        for name, tensor in tensors.items()
        if name.startswith(TORCHVISION_LAYERS) and tensor.is_floating_point()
    }


def _tensors(path: Path, content: bytes) -> "dict[str, Tensor]":
    """Raises ConfigError when content is damaged, or a tensor holds what is not a number."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"{KEY}: {path}: not a whole safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(
                f"{KEY}: {path}: tensor {name!r}: found NaN or infinity, allowed finite numbers"
            )
    return tensors
