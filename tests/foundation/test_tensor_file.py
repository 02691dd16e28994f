"""Files of one model are the same bytes, whatever process wrote them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from perennial.foundation.files import hash_file, replace_file
from perennial.foundation.tensor_file import NAMES, yield_pieces

WRITE = """
import torch
from pathlib import Path
from perennial.models.saved import Inputs, save_model
inputs = Inputs((3,), "float32", torch.zeros(3), torch.ones(3), {"age": "numeric"})
tensors = {"head.weight": torch.arange(6.0).view(2, 3), "head.bias": torch.zeros(2)}
save_model(Path("model.safetensors"), tensors, inputs, ["angina", "naïve"], '{"seed": 1}')
"""


def test_two_processes_write_one_model_as_the_same_bytes(tmp_path: Path) -> None:
    found = set()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        subprocess.run([sys.executable, "-c", WRITE], cwd=folder, check=True)
        found.add(hash_file(folder / "model.safetensors"))
    assert len(found) == 1
    data = (tmp_path / "0" / "model.safetensors").read_bytes()
    assert found == {hashlib.sha256(data).hexdigest()}


def test_the_file_is_read_as_it_was_written_and_its_metadata_are_in_order(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(4, dtype=torch.int64)}
    metadata = {"z": "1", "é": json.dumps(["ü", "\n"]), "a": "2"}
    path = tmp_path / "x.safetensors"
    replace_file(path, yield_pieces(tensors, metadata))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == metadata
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    header = path.read_bytes()[8:]
    assert header.index(b'"a":"2"') < header.index(b'"z":"1"')


@pytest.mark.parametrize("metadata", [None, {"facts": '{"ü": 1}'}])
def test_the_bytes_are_the_library_s(metadata: dict[str, str] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{name}/{shape}": (100 * torch.rand(shape, generator=generator)).to(getattr(torch, name))
        for name in NAMES
        for shape in ((), (0, 3), (2, 3))
    }
    assert b"".join(yield_pieces(tensors, metadata)) == save(tensors, metadata)
