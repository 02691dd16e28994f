"""Arrays of .npz files: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perennial.data.config import DataConfig
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.foundation.errors import DataError


def read(**block: Any) -> Source:
    return load(DataConfig.model_validate(block), seed=1)


def save_arrays(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return str(path)


@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 5, 1), (6, 1, 4, 5), (6, 4, 5, 3), (6, 3, 4, 5)])
def test_npz_images_of_any_layout_become_channels_first(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    source = read(source="npz", path=save_arrays(tmp_path / "a.npz", x=pixels, y=np.arange(6) % 2))
    channels = 3 if 3 in shape else 1
    assert source.train.x.shape == (6, channels, 4, 5)
    expected = pixels.transpose(0, 3, 1, 2) if shape[-1] in (1, 3) else pixels.reshape(6, channels, 4, 5)
    assert np.array_equal(source.train.x.numpy(), expected)
    assert (source.mean.tolist(), source.std.tolist()) == ([0.5] * channels, [0.25] * channels)


def test_npz_takes_other_names_a_test_part_sites_and_class_names(tmp_path: Path) -> None:
    path = save_arrays(
        tmp_path / "a.npz",
        nakayama_x=np.eye(4, dtype=np.int8),
        nakayama_y=np.array([1, 0, 1, 0], dtype=np.uint8),
        x_test=np.zeros((2, 4)),
        y_test=np.array([0, 1]),
        nakayama_classes=np.array(["mel", "nv"]),
        site=np.array(["north", "south", "north", "south"]),
        site_test=np.array(["south", "south"]),
    )
    names = {"x": "nakayama_x", "y": "nakayama_y", "classes": "nakayama_classes"}
    source = read(source="npz", path=path, arrays=names, labels={"nv": "naevus"}, classes=["naevus", "mel"])
    assert source.test is not None
    assert source.train.x.dtype == torch.float32
    assert source.train.y.tolist() == [0, 1, 0, 1]
    assert source.test.y.tolist() == [1, 0]
    assert source.train.site_names == source.test.site_names == ("north", "south")
    assert source.train.site is not None and source.train.site.tolist() == [0, 1, 0, 1]
    assert source.test.site is not None and source.test.site.tolist() == [1, 1]
    assert source.mean.isnan().all()


X, Y = np.zeros((3, 2), dtype=np.float32), np.arange(3)
PIXELS = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"x": X}, {}, "no array 'y'"),
        ({"x": X, "label": Y}, {"arrays": {"y": "lable"}}, "no array 'lable' .did you mean 'label'"),
        ({"x": X, "y": Y[:2]}, {}, r"y has shape \(2,\) for 3 rows of x"),
        ({"x": X[:0], "y": Y[:0]}, {}, "x holds no sample"),
        ({"x": np.full((3, 2), np.nan), "y": Y}, {}, r"x\[0, 0\]: nan is not a finite number"),
        ({"x": np.zeros((3, 4, 4), dtype=np.int32), "y": Y}, {}, "allowed: uint8 images"),
        ({"x": X, "y": Y.astype(np.float32)}, {}, "must hold integers or texts; found float32"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, {}, r"y\[2\]: 2 is no index into 2 names"),
        ({"x": X, "y": Y}, {"classes": ["0", "1"]}, r"y\[2\]: label '2' is not in the registry"),
        ({"x": X, "y": Y, "x_test": X}, {}, "x_test and y_test come together"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, {}, r"x_test holds float32 \(1,\), but x holds"),
        ({"x": X, "y": Y, "site": Y[:1]}, {}, r"site has shape \(1,\) for 3 samples"),
        ({"x": np.array([None] * 3, dtype=object), "y": Y}, {}, "not an .npz file of plain arrays"),
        ({"x": np.float32(3), "y": Y}, {}, r"x: float32 of shape \(\); allowed: uint8 images"),
        ({"x": PIXELS[:, :, :0], "y": Y}, {}, r"x: uint8 of shape \(3, 4, 0\); allowed"),
        (
            {"x": X, "y": Y, "classes": np.array("a")},
            {},
            r"classes: must be a list of names; found shape \(\)",
        ),
        ({"x": X, "y": Y, "classes": np.array(["a", "b", "a"])}, {}, "classes: 'a' is listed more than once"),
        (
            {"x": X, "y": Y, "site": Y, "site_names": np.array(["w", "g", "w"])},
            {},
            "site_names: 'w' is listed more than once",
        ),
        (
            {"x": X, "y": np.array([0, 7, 9]), "classes": np.array(["a", "b"])},
            {},
            r"y\[1\]: 7 is no index into 2 names",
        ),
        ({"x": X, "y": np.array([b"n\xe6vus", b"b", b"c"])}, {}, r"y: b'n\\xe6vus' is not text in UTF-8"),
        (
            {"x": PIXELS, "y": Y, "x_test": PIXELS[:, None] / 255, "y_test": Y},
            {},
            r"x_test holds float32 \(1, 4, 4\), but x holds uint8 \(1, 4, 4\)",
        ),
        ({"x": PIXELS[:, None] / 255, "y": Y}, {"image_size": 8}, "x: .*image_size.* ask for uint8 images"),
        ({"x": PIXELS[:, None] / 255, "y": Y}, {"color": "gray"}, "x: .*color ask for uint8 images"),
        ({"x": X, "y": Y}, {"image_size": 8}, "x: .*image_size.* ask for uint8 images"),
        ({"x": np.zeros((3, 4, 4, 4), np.uint8), "y": Y}, {}, "neither 1 nor 3 channels, first or last"),
        ({"x": np.zeros((3, 4, 4, 4)), "y": Y}, {}, "neither 1 nor 3 channels, first or last"),
    ],
)
def test_an_npz_that_cannot_be_used_says_why(
    tmp_path: Path, arrays: dict[str, np.ndarray], options: dict[str, Any], words: str
) -> None:
    path = save_arrays(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        read(source="npz", path=path, **options)
    assert "bad.npz" in str(caught.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_npz_is_named_or_read_whatever_byte_is_wrong(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "bad.npz"
    save(path, x=PIXELS, y=Y)
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read(source="npz", path=str(path))
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > len(whole) / 2
