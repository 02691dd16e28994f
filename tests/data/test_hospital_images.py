"""Images as hospitals have them: DICOM, more than 8 bits, grey among colour, files that cannot be read."""

import io
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from perennial.client.state import DECODED, remove_decoded
from perennial.data.config import DataConfig
from perennial.data.images import conform
from perennial.data.samples import Source
from perennial.data.sources import load
from perennial.foundation.errors import DataError

NAME = "DOE^JANE"


def read(path: Path, cache: Path | None = None, **block: Any) -> Source:
    return load(DataConfig.model_validate({"source": "folder", "path": str(path), **block}), 0, cache)


def write_dicom(path: Path, pixels: np.ndarray, **elements: Any) -> Path:
    """A CT-like file of these pixels: (H, W), (F, H, W) or (H, W, 3)."""
    pydicom = pytest.importorskip("pydicom", reason="the extra dicom is not installed")
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    colour = pixels.shape[-1] == 3
    dataset.PatientName, dataset.PatientID = NAME, "4711"
    dataset.Rows, dataset.Columns = pixels.shape[-3:-1] if colour else pixels.shape[-2:]
    dataset.SamplesPerPixel = 3 if colour else 1
    dataset.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        dataset.PlanarConfiguration = 0
    elif pixels.ndim == 3:
        dataset.NumberOfFrames = len(pixels)
    bits = pixels.dtype.itemsize * 8
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = bits, bits, bits - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for name, value in elements.items():
        setattr(dataset, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


RAMP = np.arange(0, 4096, 256, dtype=np.int16).reshape(4, 4)
CT = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": 40, "WindowWidth": 400}


def test_a_dicom_file_is_seen_by_its_own_window(tmp_path: Path) -> None:
    write_dicom(tmp_path / "a" / "1.dcm", RAMP, **CT)
    x = read(tmp_path, color="gray").train.x
    hounsfield = RAMP.astype(float) - 1024
    low, high = 40 - 0.5 - 199.5, 40 - 0.5 + 199.5
    expected = np.clip(np.rint((hounsfield - low) * 255 / (high - low)), 0, 255)
    assert x.shape == (1, 1, 4, 4) and np.array_equal(x[0, 0].numpy(), expected)
    assert torch.equal(read(tmp_path, color="gray", window="file").train.x, x)
    lung = read(tmp_path, color="gray", window=[-1350, 150]).train.x[0, 0].numpy()
    assert np.array_equal(lung, np.clip(np.rint((hounsfield + 1350) * 255 / 1500), 0, 255))


def test_monochrome1_is_turned_round(tmp_path: Path) -> None:
    write_dicom(tmp_path / "a" / "1.dcm", RAMP, **CT)
    write_dicom(tmp_path / "b" / "1.dcm", RAMP, **CT, PhotometricInterpretation="MONOCHROME1")
    x = read(tmp_path, color="gray").train.x
    assert torch.equal(x[0], 255 - x[1])


def test_a_file_without_a_window_needs_one(tmp_path: Path) -> None:
    write_dicom(tmp_path / "a" / "1.dcm", RAMP)
    with pytest.raises(DataError, match=r"1\.dcm: the file has no window of its own; set data\.window"):
        read(tmp_path)
    full = read(tmp_path, color="gray", window="full").train.x
    assert full[0, 0, 0, 0] == 128
    write_dicom(tmp_path / "a" / "1.dcm", np.full((4, 4), 9, np.uint8))
    assert (read(tmp_path).train.x == 9).all()


def test_several_frames_are_refused(tmp_path: Path) -> None:
    frames = np.stack([np.full((4, 4), value, np.uint8) for value in (10, 20, 30, 40)])
    write_dicom(tmp_path / "a" / "1.dcm", frames)
    with pytest.raises(DataError, match=r"holds 4 frames; make a file of the one"):
        read(tmp_path)


SHADES = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
DEEP = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint16) * 130
JPEG_LOSSLESS, JPEG_LS, MPEG4 = "1.2.840.10008.1.2.4.70", "1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.102"


def write_compressed(path: Path, pixels: np.ndarray, syntax: str, frame: bytes, **elements: Any) -> Path:
    """A file whose only frame is `frame`, compressed by somebody as `syntax`."""
    write_dicom(path, pixels, **elements)
    import pydicom
    from pydicom.encaps import encapsulate
    from pydicom.uid import UID

    dataset = pydicom.dcmread(path)
    dataset.PixelData = encapsulate([frame])
    dataset["PixelData"].VR = "OB"
    dataset.file_meta.TransferSyntaxUID = UID(syntax)
    dataset.save_as(path, enforce_file_format=True)
    return path


def by_pillow(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def test_files_compressed_by_jpeg_and_jpeg_2000_are_read(tmp_path: Path) -> None:
    from pydicom.uid import JPEG2000Lossless, JPEGBaseline8Bit

    write_compressed(
        tmp_path / "a" / "1.dcm", SHADES, JPEGBaseline8Bit, by_pillow(SHADES, "JPEG", quality=95)
    )
    x = read(tmp_path, color="gray").train.x[0, 0].int()
    assert (x - torch.from_numpy(SHADES).int()).abs().max() <= 6
    write_compressed(tmp_path / "a" / "1.dcm", DEEP, JPEG2000Lossless, by_pillow(DEEP, "JPEG2000"))
    x = read(tmp_path, color="gray", window=[0, 4095]).train.x[0, 0].numpy()
    assert np.array_equal(x, np.rint(DEEP * (255.0 / 4095)).astype(np.uint8))


def test_what_cannot_be_decompressed_names_the_syntax_and_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pydicom", reason="the extra dicom is not installed")
    from pydicom.pixels.decoders.base import JPEGLosslessSV1Decoder

    write_compressed(tmp_path / "a" / "1.dcm", SHADES, JPEG_LOSSLESS, b"nothing that a decoder knows")
    with monkeypatch.context() as without:
        without.setattr(JPEGLosslessSV1Decoder, "_available", {})
        with pytest.raises(
            DataError, match=r"JPEG Lossless.*4\.70.*no decoder.*perennial-fl\[dicom-compressed\]"
        ):
            read(tmp_path)
    write_compressed(tmp_path / "a" / "1.dcm", SHADES, MPEG4, b"a film")
    with pytest.raises(
        DataError, match=r"1\.dcm: its pixels are compressed as MPEG-4.*cannot be decompressed"
    ):
        read(tmp_path)
    from pydicom.uid import JPEGBaseline8Bit

    write_compressed(tmp_path / "a" / "1.dcm", SHADES, JPEGBaseline8Bit, b"\xff\xd8 and no more")
    with pytest.raises(DataError, match=r"1\.dcm: its pixels are compressed as JPEG Baseline .*damaged"):
        read(tmp_path)


def test_nothing_that_identifies_a_patient_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = write_dicom(tmp_path / "a" / "1.dcm", RAMP, **CT, PatientBirthDate=f"{NAME}-1970")
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-20])
    (tmp_path / "a" / "2.dcm").write_bytes(content[:300])
    with caplog.at_level(logging.DEBUG), pytest.raises(DataError) as caught:
        read(tmp_path)
    told = f"{caught.value} {caplog.text} {''.join(capsys.readouterr())}"
    assert "1.dcm" in told and "2.dcm" in told
    for secret in ("DOE", "JANE", "4711", "1970"):
        assert secret not in told


def test_arrays_of_more_than_eight_bits_take_a_window(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    x = np.linspace(-1, 1, 2 * 6 * 6, dtype=np.float32).reshape(2, 1, 6, 6)
    np.savez(path, x=x, y=np.array([0, 1]))
    block = {"source": "npz", "path": str(path)}
    assert load(DataConfig.model_validate(block), 0).train.x.dtype == torch.float32
    with pytest.raises(DataError, match=r"data\.window"):
        load(DataConfig.model_validate({**block, "image_size": 4}), 0)
    block |= {"window": [-1, 1], "image_size": 4, "color": "rgb"}
    read_ = load(DataConfig.model_validate(block), 0).train.x
    assert read_.dtype == torch.uint8 and read_.shape == (2, 3, 4, 4)


def test_the_aspect_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    half = np.full((20, 40), 255, np.uint8)
    half[:, :10] = 0
    Image.fromarray(half).save(tmp_path / "a" / "x.png")
    rows = {
        kind: read(tmp_path, color="gray", image_size=8, resize=kind).train.x[0, 0]
        for kind in ("pad", "crop")
    }
    stretched = read(tmp_path, color="gray", image_size=8).train.x[0, 0]
    assert (stretched[:, 0] == 0).all() and (stretched[:, 3:] == 255).all()
    assert (rows["pad"][[0, 1, 6, 7]] == 0).all() and (rows["pad"][2:6, 3:] == 255).all()
    assert (rows["crop"][:, 1:] == 255).all()
    array = torch.from_numpy(half)[None, None]
    for kind in ("pad", "crop"):
        difference = conform(array, (8, 8), None, kind)[0, 0].int() - rows[kind].int()
        assert difference.abs().max() <= 1


def test_decoded_images_that_are_read_are_not_cleaned_away(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("L", (4, 4), 10).save(tmp_path / "data" / name / "one.png")
    read(tmp_path / "data", tmp_path / DECODED)
    (cached,) = (tmp_path / DECODED).iterdir()
    os.utime(cached, (0, 0))
    read(tmp_path / "data", tmp_path / DECODED)
    assert remove_decoded(tmp_path, days=30) == 0 and cached.exists()
    os.utime(cached, (0, 0))
    assert remove_decoded(tmp_path, days=30) > 0 and not cached.exists()
    assert remove_decoded(tmp_path, days=0) == 0


def test_unreadable_files_are_left_out_where_the_site_says_so(tmp_path: Path) -> None:
    for index in range(9):
        path = tmp_path / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4), 10 * index).save(path)
    (tmp_path / "a" / "bad.png").write_text("no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        read(tmp_path)
    for _ in range(2):
        source = read(tmp_path, tmp_path / "cache", unreadable="skip")
        assert source.train.x[:, 0, 0, 0].tolist() == [0, 20, 40, 60, 80, 10, 30, 50, 70]
        assert source.train.y.tolist() == [0] * 5 + [1] * 4
        assert source.train.keys is not None and "a/bad.png" not in source.train.keys
        assert "1 of 10" in source.notes[0] and "bad.png" in source.notes[0]
    (tmp_path / "a" / "worse.png").write_text("no image")
    with pytest.raises(DataError, match=r"worse\.png"):
        read(tmp_path, unreadable="skip")
