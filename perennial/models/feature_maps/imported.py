"""Reads a network's checkpoint of another program by timm's names.

Read are safetensors, and the initialisers of an ONNX file; nothing that can run code. Names are timm's, or
those of Hugging Face's ViT, DeiT and DINOv2, maybe behind a prefix. PyTorch's exporter to ONNX writes the
weight of a linear layer transposed and without its name; the node that uses it says which layer it is.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from perennial.foundation.errors import ConfigError

PREFIXES = ("module.", "model.", "backbone.", "network.", "timm_model.", "vit.", "deit.", "dinov2.")
_HUGGING_FACE = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
"""What a name of Hugging Face's becomes, applied in this order."""
_PARTS = ("query", "key", "value")
"""Of attention, which timm has in one tensor."""
MOST_NAMED = 5


def parse_tensors(content: bytes, path: Path | str) -> dict[str, Tensor]:
    """Parse the content of a safetensors file. Raises ConfigError naming `path` if it is damaged."""
    try:
        return load(content)
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); remove it") from error


def read_tensors(path: Path, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by timm's names as far as they have one.

    target: those of the network without its classifier. Raises ConfigError naming the file if it cannot be
    read without running code.
    """
    return _join_positions(_rename_tensors(_read(path), target), target)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".safetensors", ".onnx"):
        raise ConfigError(
            f"{path}: allowed: .safetensors and .onnx; other checkpoints can run code when they are read"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return (
        parse_tensors(content, path) if path.suffix == ".safetensors" else _read_initialisers(content, path)
    )


def _read_initialisers(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ConfigError(f"{path}: needs the extra onnx: pip install perennial-fl[onnx]") from error
    try:
        model = onnx.load_from_string(content)
    except DecodeError as error:
        raise ConfigError(f"{path}: damaged ({error})") from error
    outside = [each.name for each in model.graph.initializer if each.external_data]
    if outside:
        raise ConfigError(
            f"{path}: keeps {format_names(outside)} in other files; allowed: one file with all of it"
        )
    found = {
        each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy())
        for each in model.graph.initializer
    }
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]].clone()  # tensors of the same values are stored once
    for nameless, layer in _find_linear_layers(model.graph, found).items():
        found[f"{layer}.weight"] = found.pop(nameless).T
    return found


def _find_linear_layers(graph: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of a matrix by which a node multiplies -> the linear layer whose weight it is.

    The bias that is added to the product has kept its name; a layer without one is known by its node's.
    """
    added_to = {
        given: other
        for node in graph.node
        if node.op_type == "Add"
        for given, other in (node.input, reversed(node.input))
        if other.endswith(".bias") and other in tensors
    }
    found = {}
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in tensors or node.input[1].endswith(".weight"):
            continue
        if bias := added_to.get(node.output[0]):
            found[node.input[1]] = bias.removesuffix(".bias")
        elif "/" in node.name:
            found[node.input[1]] = _name_layer(node.name)
    return found


def _name_layer(node: str) -> str:
    """The layer of a node: of /blocks/blocks.0/attn/qkv/MatMul blocks.0.attn.qkv."""
    parts = node.strip("/").split("/")[:-1]
    return ".".join(
        part for part, inner in zip(parts, [*parts[1:], ""], strict=True) if not inner.startswith(f"{part}.")
    )


def _join_positions(found: dict[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the embeddings of positions, which a network of any image size has exported in two parts."""
    if "pos_embed" in found or "pos_embed" not in target:
        return found
    one, many, width = target["pos_embed"].shape
    shapes = ((one, 1, width), (one, many - 1, width))
    parts = [
        [name for name, tensor in found.items() if name not in target and tensor.shape == shape]
        for shape in shapes
    ]
    if [len(names) for names in parts] == [1, 1]:
        found["pos_embed"] = torch.cat([found.pop(names[0]) for names in parts], dim=1)
    return found


def _rename_tensors(tensors: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by timm's names as far as they have one."""
    bare = {_strip_prefixes(name, target): tensor for name, tensor in tensors.items()}
    found = {}
    for name, tensor in bare.items():
        ours = name
        for pattern, replacement in _HUGGING_FACE if name not in target else ():
            ours = re.sub(pattern, replacement, ours)
        found[ours] = tensor
    return _join_attention(found)


def _strip_prefixes(name: str, target: Mapping[str, Tensor]) -> str:
    while name not in target:
        prefix = next((each for each in PREFIXES if name.startswith(each)), None)
        if prefix is None:
            break
        name = name.removeprefix(prefix)
    return name


def _join_attention(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value of attention, one below the other."""
    for name in list(found):
        before, query, after = name.rpartition(".query.")
        parts = [f"{before}.{part}.{after}" for part in _PARTS]
        if query and all(part in found for part in parts):
            found[f"{before}.qkv.{after}"] = torch.cat([found.pop(part) for part in parts])
    return found


def format_names(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
