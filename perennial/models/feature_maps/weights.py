"""Weights of networks that were trained elsewhere: from a file that is known by its hash, or from a package.

Ordinary packages bring them, as checkpoints of PyTorch or files of ONNX. Each is read once, without running
code and only if it has the hash in config.PACKAGES, and kept as safetensors.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from perennial.foundation.cache import find_cache_folder
from perennial.foundation.errors import ConfigError
from perennial.foundation.files import make_folder, replace_file
from perennial.models.feature_maps.config import EXTRA, PACKAGES, PretrainedConfig
from perennial.models.feature_maps.imported import format_names, parse_tensors, read_tensors

CLASSIFIER = "_fc."
"""What the packages' last layer is called; it is left out."""


@lru_cache(maxsize=2)
def load_weights(network: str, weights: str | None = None, sha256: str | None = None) -> dict[str, Tensor]:
    """A network's tensors by timm's names, without its classifier; arguments as in PretrainedConfig.

    Raises ConfigError if the weights are missing, damaged, or have another hash.
    """
    if network in PACKAGES:
        return _from_package(network)
    assert sha256 is not None
    return parse_tensors(read_known_content(f"weights of {network}", weights, sha256), weights or sha256)


def read_known_content(what: str, file: str | None, sha256: str) -> bytes:
    """The bytes with this SHA-256: of the file if it is there, otherwise from the cache.

    file: None looks in the cache alone. Raises ConfigError, which calls the weights `what`, when neither
    exists or the one that was read has another hash.
    """
    kept = find_cache_folder() / "weights" / f"{sha256}.safetensors"
    path = Path(file) if file is not None else kept
    if not path.is_file() and kept.is_file():
        path = kept
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model.features: {what}: {path}: cannot be read ({error.strerror}); give "
            f"the file, or put it at {kept}"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"model.features: {what}: {path}: found SHA-256 {found:.12}, the experiment has {sha256:.12}"
        )
    return content


def name_network(config: PretrainedConfig) -> str:
    """The network's name in timm."""
    return PACKAGES[config.network].network if config.network in PACKAGES else config.network


@dataclass(frozen=True)
class Imported:
    """A checkpoint in the cache. left_out: tensors that the network without its classifier does not have."""

    path: Path
    sha256: str
    left_out: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def import_weights(path: Path, network: str) -> Imported:
    """Write a checkpoint's tensors, by timm's names, to a file in the cache, whole or not at all.

    network: its name in timm. Raises ConfigError naming the file if it cannot be read without running
    code, or naming the tensors that it lacks or has in another shape.
    """
    built: Any = build_bare_network(network)
    found, left_out = _select_tensors(path, network, built.state_dict())
    content = save(found)
    sha256 = hashlib.sha256(content).hexdigest()
    kept = find_cache_folder() / "weights" / f"{sha256}.safetensors"
    make_folder(kept.parent)
    replace_file(kept, content)
    about = built.pretrained_cfg
    return Imported(kept, sha256, left_out, tuple(about["mean"]), tuple(about["std"]))


def _select_tensors(
    path: Path, network: str, target: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """(the checkpoint's tensors that the network has, names of all others)."""
    found = read_tensors(path, target)
    missing = [name for name in target if name not in found]
    if missing:
        raise ConfigError(
            f"{path}: {len(missing)} of the {len(target)} tensors of {network} are not in it: "
            f"{format_names(missing)}; found names such as {format_names(sorted(found))}; allowed: "
            "timm's names, or Hugging Face's of ViT, DeiT and DINOv2"
        )
    wrong = [
        f"{name} {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in target.items()
        if found[name].shape != tensor.shape
    ]
    if wrong:
        raise ConfigError(f"{path}: not the tensors of {network}: {format_names(wrong)}")
    taken = {name: found[name].to(tensor.dtype).contiguous() for name, tensor in target.items()}
    return taken, sorted(found.keys() - target.keys())


def _from_package(name: str) -> dict[str, Tensor]:
    package = PACKAGES[name]
    kept = find_cache_folder() / "weights" / f"{package.checkpoint}-timm.safetensors"
    if kept.is_file():
        return parse_tensors(kept.read_bytes(), kept)
    spec = find_spec(package.module)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model.features: network {name!r} takes its weights from the package {package.module}, which is "
            f"not installed; {package.install}"
        )
    path = Path(spec.origin).parent / package.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {package.install}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != package.checkpoint:
        raise ConfigError(
            f"{path}: found SHA-256 {found:.12}, allowed {package.checkpoint:.12}; {package.install}"
        )
    if path.suffix == ".onnx":
        target = build_bare_network(package.network).state_dict()
        tensors, _ = _select_tensors(path, package.network, target)
    else:
        tensors = _rename_tensors(torch.load(path, map_location="cpu", weights_only=True), package.network)
    make_folder(kept.parent)
    replace_file(kept, save(tensors))
    return tensors


def _rename_tensors(checkpoint: Mapping[str, Tensor], network: str) -> dict[str, Tensor]:
    """The checkpoint's tensors by timm's names: both list the same layers in the same order."""
    target = build_bare_network(network).state_dict()
    found = {name: tensor for name, tensor in checkpoint.items() if not name.startswith(CLASSIFIER)}
    if [tensor.shape for tensor in found.values()] != [tensor.shape for tensor in target.values()]:
        raise ConfigError(f"model.features: the weights' layers are not those of timm's {network}")
    return {name: tensor.contiguous() for name, tensor in zip(target, found.values(), strict=True)}


def build_bare_network(name: str) -> torch.nn.Module:
    """A network of timm's without its classifier, in evaluation mode, with unset weights.

    Raises ConfigError if timm is missing or has no network of this name.
    """
    from perennial.foundation.torchvision_import import import_torchvision

    import_torchvision()  # before timm, which imports it as it is
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"model.features: pretrained needs timm ({error}); {EXTRA}") from error
    if not timm.is_model(name):
        raise ConfigError(f"model.features.network: timm has no {name!r}")
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(name, pretrained=False, num_classes=0).eval()
