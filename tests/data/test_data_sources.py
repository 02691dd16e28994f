"""Digits, benchmark packs, torchvision and generated groups: what is read, and what is refused."""

import hashlib
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from perennial.data.config import DataConfig
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.foundation.errors import DataError

BENCHMARKS = Path(__file__).parents[3] / "shared" / "data"
needs_benchmarks = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmark packs are not here")


def read(**block: Any) -> Source:
    return load(DataConfig.model_validate(block), seed=1)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    source, (pixels, labels) = read(source="digits"), load_digits(return_X_y=True)
    assert source.train.x.dtype == torch.uint8
    assert source.train.x.shape == (1797, 1, 8, 8)
    assert np.array_equal(np.rint(source.train.x.numpy() * (16 / 255)).reshape(-1, 64), pixels)
    assert np.array_equal(source.train.y.numpy(), labels)
    assert (source.classes, source.test) == (tuple("0123456789"), None)
    scaled = source.train.x.float() / 255
    assert abs(scaled.mean() - source.mean[0]) < 1e-3
    assert abs(scaled.std() - source.std[0]) < 1e-3


def test_a_benchmark_gives_the_classes_that_are_listed() -> None:
    source = read(source="digits", classes=["7", "2"])
    assert source.classes == ("7", "2")
    everything = read(source="digits").train
    assert len(source.train) == int(((everything.y == 7) | (everything.y == 2)).sum())
    assert torch.equal(source.train.x[source.train.y == 0], everything.x[everything.y == 7])
    with pytest.raises(DataError, match="'11' is not in the data"):
        read(source="digits", classes=["1", "11"])


def write_pack(path: Path, images: dict[str, np.ndarray], arrays: dict[str, np.ndarray], **meta: Any) -> str:
    """Sheets of 2 x 3 tiles."""
    described: dict[str, Any] = {}
    with zipfile.ZipFile(path, "w") as pack:
        for name, x in images.items():
            n, h, w, c = x.shape
            sheets = -(-n // 6)
            for index in range(sheets):
                grid = np.zeros((2 * h, 3 * w, 3), dtype=np.uint8)
                for place, tile in enumerate(x[6 * index : 6 * index + 6]):
                    row, column = divmod(place, 3)
                    grid[row * h : (row + 1) * h, column * w : (column + 1) * w] = tile
                content = io.BytesIO()
                Image.fromarray(grid).save(content, "WEBP", lossless=True)
                pack.writestr(f"{name}_{index:03d}.webp", content.getvalue())
            described[name] = dict(
                kind="sheets",
                n=n,
                h=h,
                w=w,
                c=c,
                sheets=sheets,
                sha256=hashlib.sha256(x.tobytes()).hexdigest(),
            )
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            pack.writestr(f"{name}.npy", content.getvalue())
            described[name] = dict(kind="npy", sha256=hashlib.sha256(array.tobytes()).hexdigest())
        pack.writestr("meta.json", json.dumps({**meta, "arrays": described}))
    return str(path)


def test_a_pack_gives_images_labels_sites_and_its_official_split(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (10, 5, 4, 3), dtype=np.uint8)
    arrays = {
        "y": (np.arange(10) % 3).astype(np.uint8),
        "site": np.repeat([0, 1], 5).astype(np.uint8),
        "is_test": np.array([1, 0] * 5, dtype=np.uint8),
    }
    path = write_pack(
        tmp_path / "a.webp.zip",
        {"x": x},
        arrays,
        class_names=["mel", "nv", "df"],
        site_names=["wien", "graz"],
    )
    source = read(source="pack", path=path, partition={"kind": "natural"})
    assert source.test is not None and source.train.site is not None
    assert np.array_equal(source.test.x.numpy(), x[::2].transpose(0, 3, 1, 2))
    assert np.array_equal(source.train.x.numpy(), x[1::2].transpose(0, 3, 1, 2))
    assert source.train.x.is_contiguous()
    assert source.train.y.tolist() == [1, 0, 2, 1, 0]
    assert source.train.site.tolist() == [0, 0, 1, 1, 1]
    assert (source.classes, source.train.site_names) == (("mel", "nv", "df"), ("wien", "graz"))


def test_a_damaged_pack_names_the_array(tmp_path: Path) -> None:
    x = np.zeros((7, 4, 4, 1), dtype=np.uint8)
    path = Path(
        write_pack(tmp_path / "a.zip", {"x": x}, {"y": np.zeros(7, dtype=np.uint8)}, class_names=["a"])
    )
    assert read(source="pack", path=str(path)).train.x.shape == (7, 1, 4, 4)
    with zipfile.ZipFile(path) as pack:
        meta = json.loads(pack.read("meta.json"))
        members = {name: pack.read(name) for name in pack.namelist()}
    meta["arrays"]["x"]["sha256"] = "0" * 64
    for changes, words in (
        ({"meta.json": json.dumps(meta).encode()}, "array 'x' is damaged"),
        ({"x_001.webp": None}, "not a whole benchmark pack"),
        ({"meta.json": b"{"}, "not a whole benchmark pack"),
    ):
        with zipfile.ZipFile(path, "w") as pack:
            for name, content in {**members, **changes}.items():
                if content is not None:
                    pack.writestr(name, content)
        with pytest.raises(DataError, match=words):
            read(source="pack", path=str(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in members.items():
            pack.writestr(name, content)
    broken = path.read_bytes().replace(zlib.compress(members["meta.json"], wbits=-15)[:4], b"\xff" * 4)
    path.write_bytes(broken)
    with pytest.raises(DataError, match="not a whole benchmark pack"):
        read(source="pack", path=str(path))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="not a whole benchmark pack"):
        read(source="pack", path=str(path))
    with pytest.raises(DataError, match=r"gone\.zip: cannot be read"):
        read(source="pack", path=str(tmp_path / "gone.zip"))


@needs_benchmarks
def test_ham10000_is_four_real_sites_with_a_test_set() -> None:
    source = read(source="pack", path=str(BENCHMARKS / "ham10000_32.webp.zip"), partition={"kind": "natural"})
    assert source.test is not None and source.train.site is not None and source.test.site is not None
    assert (len(source.train), len(source.test)) == (7994, 2021)
    assert source.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    assert source.train.site_names == ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    per_site = torch.bincount(source.train.site) + torch.bincount(source.test.site)
    assert per_site.tolist() == [2259, 3363, 3954, 439]


@pytest.mark.slow
@needs_benchmarks
def test_fashion_mnist_comes_whole_from_its_pack() -> None:
    source = read(source="pack", path=str(BENCHMARKS / "fashion_mnist.webp.zip"))
    assert source.test is not None
    assert source.train.x.shape == (60000, 1, 28, 28)
    assert torch.bincount(source.train.y).tolist() == [6000] * 10
    assert torch.bincount(source.test.y).tolist() == [1000] * 10
    assert source.classes[0] == "T-shirt/top"


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.tobytes())


@pytest.mark.parametrize(("dataset", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_reads_a_local_root(tmp_path: Path, dataset: str, folder: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    y = np.array([3, 0, 9, 3, 1, 2], dtype=np.uint8)
    raw = tmp_path / folder / "raw"
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", x)
        write_idx(raw / f"{part}-labels-idx1-ubyte", y)
    source = read(source="torchvision", dataset=dataset, path=str(tmp_path))
    assert source.test is not None
    assert np.array_equal(source.train.x[:, 0].numpy(), x)
    assert source.test.y.tolist() == y.tolist()
    assert len(source.classes) == 10


def test_groups_are_generated_as_described() -> None:
    config = DataConfig.model_validate({"source": "synth_groups", "partition": {"kind": "natural"}})
    source = load(config, seed=3)
    assert source.test is not None and source.train.site is not None and source.test.site is not None
    assert source.train.x.shape == (16 * 30, 1, 8, 8)
    assert torch.bincount(source.train.site).tolist() == [30] * 16
    assert torch.bincount(source.test.site).tolist() == [100] * 16
    assert source.train.site_names[5] == "group-1-site-1"
    labels, site = (
        torch.cat([source.train.y, source.test.y]),
        torch.cat([source.train.site, source.test.site]),
    )
    own = labels // 4 == site // 4
    assert abs(own.float().mean() - 0.8) < 0.03
    for index in range(16):
        assert len(labels[(site == index) & ~own].unique()) == 1
    assert torch.equal(load(config, seed=3).train.x, source.train.x)
    assert not torch.equal(load(config, seed=4).train.x, source.train.x)
