"""Folders of images and manifests: layouts, modes of images, and everything that can be wrong with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from perennial.data.config import DataConfig
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.foundation.errors import ConfigError, DataError


def read(path: Path, cache: Path | None = None, **block: Any) -> Source:
    return load(DataConfig.model_validate({"source": "folder", "path": str(path), **block}), 0, cache)


def paint(path: Path, value: int = 100, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    """A flat image of (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).convert(mode).save(path)
    return path


def two_classes(root: Path) -> Path:
    for name, value in (("nv/b.png", 20), ("nv/a.png", 10), ("mel/patient 7/x.png", 30), ("mel/c.PNG", 40)):
        paint(root / name, value)
    return root


def test_class_folders_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    source = read(two_classes(tmp_path))
    assert source.classes == ("mel", "nv")
    assert source.train.keys == ("mel/c.PNG", "mel/patient 7/x.png", "nv/a.png", "nv/b.png")
    assert source.train.x.shape == (4, 3, 4, 6)
    assert source.train.x[:, 0, 0, 0].tolist() == [40, 30, 10, 20]
    assert source.train.y.tolist() == [0, 0, 1, 1]
    assert source.test is None
    assert read(tmp_path, color="gray").train.x.shape == (4, 1, 4, 6)


def test_a_manifest_names_images_labels_sites_and_split(tmp_path: Path) -> None:
    for index in range(4):
        paint(tmp_path / "images" / f"{index}.png", index)
    rows = [
        "path;label;site;split",
        "images/2.png;nv;b;train",
        "images/0.png;mel;a;test",
        "images/3.png;mel;b;train",
    ]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    source = read(tmp_path / "list.csv", partition={"kind": "natural"})
    assert source.test is not None and source.train.site is not None
    assert source.train.x[:, 0, 0, 0].tolist() == [2, 3]
    assert source.train.y.tolist() == [1, 0]
    assert source.test.x[:, 0, 0, 0].tolist() == [0]
    assert [source.train.site_names[site] for site in source.train.site] == ["b", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("path,lable\na.png,nv\n", "needs the column 'label' .did you mean 'lable'"),
        ("path,label\n,nv\n", "line 2: the path is empty"),
        ("path,label\na.png,\n", "the label is empty"),
        ("path,label,split\na.png,nv,val\n", "line 2: split 'val' must be train or test"),
        ("path,label\nb.png,nv\na.png,xx\n", "line 3: label 'xx' is not in the registry"),
        ("path,label\ngone.png,nv\n", "gone.png: .*No such file"),
    ],
)
def test_a_wrong_manifest_names_its_line(tmp_path: Path, content: str, words: str) -> None:
    paint(tmp_path / "a.png")
    paint(tmp_path / "b.png")
    (tmp_path / "list.csv").write_text(content)
    with pytest.raises(DataError, match=words):
        read(tmp_path / "list.csv", classes=["nv", "mel"])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_images_of_every_mode_and_size_are_read_alike(tmp_path: Path, mode: str, color: str) -> None:
    pixels = np.tile(np.repeat(np.array([0, 255], dtype=np.uint8), 8), (10, 1))
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels.astype(np.uint16) * 257)
    elif mode == "I":
        image = Image.fromarray(pixels.astype(np.int32) * 257)
    else:
        image = image.convert("RGB").convert(mode)
    path = tmp_path / "a" / "image.tif"
    path.parent.mkdir()
    image.save(path)
    paint(tmp_path / "b" / "other.png", 0, (31, 17))
    window: dict[str, Any] = {"window": "full"} if mode.startswith("I") else {}
    x = read(tmp_path, image_size=(5, 8), color=color, **window).train.x
    assert x.dtype == torch.uint8
    assert x.shape == (2, 3 if color == "rgb" else 1, 5, 8)
    assert (x[0, :, :, :3] <= 3).all()
    assert (x[0, :, :, 5:] >= 252).all()
    assert (x[1] == 0).all()


def test_the_camera_s_rotation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (6, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.jpg", exif=exif)
    assert read(tmp_path).train.x.shape[2:] == (6, 4)


def test_images_that_cannot_be_used_are_named_together(tmp_path: Path) -> None:
    two_classes(tmp_path)
    (tmp_path / "nv" / "empty.png").touch()
    whole = paint(tmp_path / "nv" / "cut.jpg", size=(64, 64)).read_bytes()
    (tmp_path / "nv" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "mel" / "text.png").write_text("not an image")
    Image.fromarray(np.zeros((4, 6), dtype=np.float32)).save(tmp_path / "mel" / "float.tif")
    with pytest.raises(DataError) as caught:
        read(tmp_path, image_size=4)
    message = str(caught.value)
    for name, reason in (
        ("empty.png", "0 bytes"),
        ("cut.jpg", "truncated"),
        ("text.png", "cannot identify"),
        ("float.tif", "need a window"),
    ):
        line = next(line for line in message.splitlines() if name in line)
        assert reason in line.lower()
    assert "c.PNG" not in message


def test_a_folder_without_classes_or_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class folder in it; expected"):
        read(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no image in it"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"gone: the folder cannot be read .No such file"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match=r"file: the folder cannot be read .Not a directory"):
        (tmp_path / "file").touch()
        read(tmp_path / "file")


def test_an_unknown_class_folder_is_named_with_the_nearest_class(tmp_path: Path) -> None:
    two_classes(tmp_path)
    (tmp_path / "melanomaa").mkdir()
    with pytest.raises(
        DataError, match=r"melanomaa: label 'melanomaa' is not in the registry .did you mean 'melanoma'"
    ):
        read(tmp_path, classes=["mel", "nv", "melanoma"])


def test_a_site_s_own_labels_become_classes(tmp_path: Path) -> None:
    source = read(
        two_classes(tmp_path), classes=["naevus", "melanoma"], labels={"mel": "melanoma", "nv": "naevus"}
    )
    assert source.classes == ("naevus", "melanoma")
    assert source.train.y.tolist() == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match=r"'nv' becomes 'nevus', which is no class .did you mean 'naevus'"):
        read(tmp_path, classes=["naevus", "mel"], labels={"nv": "nevus"})


def test_a_label_of_a_manifest_that_means_none_is_no_class(tmp_path: Path) -> None:
    two_classes(tmp_path)
    (tmp_path / "list.csv").write_text("path,label\nnv/a.png,nv\nmel/c.PNG,NaN\n")
    with pytest.raises(DataError, match=r"list\.csv, line 3: the label is empty, 'NaN'"):
        read(tmp_path / "list.csv")
    assert read(tmp_path / "list.csv", classes=["nv", "NaN"]).train.y.tolist() == [0, 1]
