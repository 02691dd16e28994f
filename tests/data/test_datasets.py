"""Source.of takes datasets as researchers have them, and says what it found where it takes none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from perennial import Source, run
from perennial.foundation.errors import ConfigError, DataError

RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
LABELS = [int(label) for label in RNG.integers(0, 2, 40)]


class Folder:
    """As torchvision's datasets are: items (PIL image, label), and names of classes."""

    classes = ("calm", "rough")

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return Image.fromarray(PIXELS[place]), LABELS[place]


class ClassLabel:
    names = ("calm", "rough")


class HuggingFace:
    """The duck type of datasets.Dataset."""

    column_names = ("img", "split", "fine_label")
    features = {"img": object(), "split": object(), "fine_label": ClassLabel()}  # noqa: RUF012

    def __getitem__(self, column: str) -> list[Any]:
        return [Image.fromarray(image) for image in PIXELS] if column == "img" else LABELS


def test_every_form_gives_the_same_arrays() -> None:
    as_tensor = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy()).float() / 255
    pairs = [(image, torch.tensor(label)) for image, label in zip(PIXELS, LABELS, strict=True)]
    forms = (Folder(), HuggingFace(), pairs)
    for form in forms:
        found = Source.of(form).by_name
        assert found["x"].dtype == np.uint8 and np.array_equal(found["x"], PIXELS)
        assert found["y"].tolist() == LABELS
    assert (
        Source.of(Folder()).by_name["classes"]
        == Source.of(HuggingFace()).by_name["classes"]
        == ["calm", "rough"]
    )
    tensors = Source.of(TensorDataset(as_tensor, torch.tensor(LABELS))).by_name
    assert tensors["x"].dtype == np.uint8 and np.array_equal(tensors["x"].transpose(0, 2, 3, 1), PIXELS)


def test_a_dataset_is_run(tmp_path: Path) -> None:
    content = {
        "model": {"name": "features", "features": [{"name": "random", "width": 10}]},
        "strategy": {"name": "analytic", "head": "ridge"},
        "tasks": {"count": 1, "rounds": 1},
        "data": {"sites": 2, "partition": {"kind": "iid"}},
    }
    result = run(content, data=Source.of(Folder(), test=Folder()), runs=tmp_path, device="cpu")
    assert sorted(result.model.classes) == ["calm", "rough"]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("cifar10", "found str 'cifar10', allowed a torchvision-style dataset"),
        ([1, 2], r"item 0 is int 1, allowed a pair \(sample, label\)"),
        ([(PIXELS[0], 0), (PIXELS[0, :4], 1)], r"sample 1 has shape \(4, 8, 3\), sample 0 has \(8, 8, 3\)"),
        ([("a.png", 0)], "a sample is str 'a.png', allowed a PIL image"),
        ([(PIXELS[0] / 100.0, 0)], "found images of type float64 from"),
        ([(PIXELS[0], np.eye(3)[0]), (PIXELS[1], np.eye(3)[1])], r"labels have shape \(2, 3\), allowed one"),
        ([(PIXELS[0], torch.eye(3)[0])], r"labels have shape \(1, 3\), allowed one number or name"),
        ({"train": [], "test": []}, r"found dict of train, test; choose .* dataset\['train'\]"),
        ([], "without samples"),
        (TensorDataset(torch.zeros(0, 3, 8, 8), torch.zeros(0)), "without samples"),
        (TensorDataset(torch.zeros(3, 2)), "a TensorDataset of 1 tensors, allowed 2"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Source.of(dataset)


def test_arrays_are_tensors_too_and_mistakes_in_them_are_named(tmp_path: Path) -> None:
    x = torch.rand(4, 2, requires_grad=True)
    Source.of(x, torch.tensor([0, 1, 0, 1])).write(tmp_path / "data.npz")
    assert np.load(tmp_path / "data.npz")["x"].shape == (4, 2)
    for missing in (None, float("nan")):
        labels = np.array(["a", "b", missing, "a"], dtype=object)
        with pytest.raises(DataError, match=f"y: found {missing}, allowed a name"):
            Source.of(x, labels).write(tmp_path / "data.npz")
    with pytest.raises(DataError, match=r"found sites \(did you mean 'site'\?\); allowed: x, y"):
        Source.of(x, [0, 1, 0, 1], sites=[0, 0, 1, 1])
    content: Any = {"model": "mlp", "tasks": {"count": 1, "rounds": 1}}
    with pytest.raises(ConfigError, match=r"data: found tuple, allowed Source\.of"):
        run(content, data=(x, [0, 1, 0, 1]), runs=tmp_path)  # pyright: ignore[reportArgumentType]
