"""The same record is known again wherever it lies, and nobody without the site's key knows any."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perennial.data.config import DataConfig
from perennial.data.deployed import load_site, merge_site_config
from perennial.data.site import SiteData
from perennial.data.splits import compute_identities
from perennial.data.survey import survey
from perennial.foundation.errors import DataError, StateError
from perennial.foundation.record_key import BOOK, record_key


def table(folder: Path, text: str, columns: dict[str, Any], name: str = "visits.csv") -> np.ndarray:
    (folder / name).write_text(text)
    common = {
        "columns": columns,
        "classes": ("ill", "well"),
        "normalise": {"mean": {"age": 0.0}, "std": {"age": 1.0}},
    }
    experiment = DataConfig.model_validate({"source": "csv", "imputation": "mean", **common})
    own = DataConfig.model_validate({"source": "csv", "path": str(folder / name)})
    data = load_site(merge_site_config(experiment, own), ("ill", "well"), "north", 0, bytes(32))
    assert data.contents is not None and data.places is not None and len(data.places) == len(data.y)
    return data.contents


def same(found: np.ndarray, other: np.ndarray) -> list[bool]:
    return [bool(row) for row in (found == other).all(axis=1)]


def test_a_row_is_the_same_whatever_its_label_its_text_and_the_order_of_columns(tmp_path: Path) -> None:
    columns = {"age": "numeric", "sex": ["f", "m"]}
    first = table(tmp_path, "age,sex,label\n31,f,ill\n42,m,well\n,f,ill\n", columns)
    turned = {"sex": ["f", "m"], "age": "numeric"}
    again = table(tmp_path, "label,sex,age\nwell,f,31.0\nwell,m,42\nill,f,\n", turned, "other.csv")
    assert same(first, again) == [True, True, True]
    changed = table(tmp_path, "age,sex,label\n31,m,ill\n43,m,well\n,f,ill\n", columns)
    assert same(first, changed) == [False, False, True]


def test_identities_need_the_key_which_stays_and_is_private(tmp_path: Path) -> None:
    key = record_key(tmp_path / "a")
    assert record_key(tmp_path / "a") == key != record_key(tmp_path / "b")
    path = tmp_path / "a" / "records" / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    contents = [bytes([place]) * 32 for place in range(3)]
    mine, theirs = (
        compute_identities(key, "record", contents),
        compute_identities(record_key(tmp_path / "b"), "record", contents),
    )
    assert mine.shape == (3, 16) and not any(same(mine, theirs))
    assert not any(same(mine, compute_identities(key, "place", contents)))


def test_a_lost_key_is_no_fresh_start(tmp_path: Path) -> None:
    record_key(tmp_path)
    folder = tmp_path / "records"
    (folder / BOOK).touch()
    (folder / "key").unlink()
    with pytest.raises(StateError, match=r"key: missing beside book\.sqlite"):
        record_key(tmp_path)
    (folder / "key").write_bytes(b"short")
    with pytest.raises(StateError, match="found 5 bytes"):
        record_key(tmp_path)


TABLE = "age;sex;remark;label\n" + "".join(
    f"{20 + row}.5;{'fm'[row % 2]};äß {row};{('ill', 'well')[row % 3 > 0]}\n" for row in range(30)
)
COLUMNS = {"age": "numeric", "sex": ["f", "m"]}


def read(folder: Path, content: bytes, name: str = "visits.csv", **own: Any) -> SiteData:
    """The data of a site under a protection."""
    (folder / name).write_bytes(content)
    constants = {"mean": {"age": 0.0}, "std": {"age": 1.0}}
    common = {"columns": COLUMNS, "classes": ("ill", "well"), "normalise": constants, "test_fraction": 0.3}
    experiment = DataConfig.model_validate({"source": "csv", "imputation": "mean", **common})
    block = DataConfig.model_validate({"source": "csv", "path": str(folder / name), **own})
    config = merge_site_config(experiment, block)
    return load_site(config, ("ill", "well"), "north", 0, bytes(32), protected=True)


@pytest.mark.parametrize(
    ("cell", "encoding", "said"),
    [
        ('99;f;"never closed;ill', "utf-8", "line 32: a quotation mark without its other one"),
        ("99;f;Müller;ill", "cp1252", "not in UTF-8"),
    ],
)
def test_under_a_protection_no_row_decides_how_others_are_read(
    tmp_path: Path, cell: str, encoding: str, said: str
) -> None:
    before = read(tmp_path, TABLE.encode(), decimal=".")
    with pytest.raises(DataError, match=f"{said}.*under a protection one row"):
        read(tmp_path, TABLE.encode() + f"{cell}\n".encode(encoding), decimal=".")
    after = read(tmp_path, TABLE.encode() + b'99;f;"never; closed";ill\n', decimal=".")
    assert before.contents is not None and after.contents is not None
    assert all(same(before.contents, after.contents[:30]))
    # and its part follows from its own texts
    assert set(before.train.tolist()) <= set(after.train.tolist())


def test_under_a_protection_the_decimal_sign_is_stated_and_types_are_of_each_cell(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.decimal: missing, allowed '\.' or ','"):
        read(tmp_path, TABLE.encode())
    # `init` has read the file and writes down what it found
    for text, found in ((TABLE, "."), (TABLE.replace(".5", ",5"), ",")):
        (tmp_path / "visits.csv").write_text(text)
        stated = survey(tmp_path / "visits.csv", "label").options["decimal"]
        assert stated == found and len(read(tmp_path, text.encode(), decimal=stated).y) == 30
    with pytest.raises(DataError, match="types of columns follow from all; save it as CSV"):
        read(tmp_path, b"", name="visits.parquet", decimal=".")


def test_under_a_protection_one_test_row_decides_nothing_about_training_rows(tmp_path: Path) -> None:
    def parts(rows: int) -> list[str]:
        lines = "".join(
            f"{row}.png,{('ill', 'well')[row % 2]},{'test' if row >= 20 else 'train'}\n"
            for row in range(rows)
        )
        (tmp_path / "manifest.csv").write_text(f"path,label,split\n{lines}")
        own = DataConfig.model_validate({"source": "folder", "path": str(tmp_path / "manifest.csv")})
        experiment = DataConfig.model_validate(
            {"source": "folder", "classes": ("ill", "well"), "image_size": 4, "color": "gray"}
            | {"normalise": {"mean": 0.5, "std": 0.5}, "test_fraction": 0.3}
        )
        data = load_site(
            merge_site_config(experiment, own), ("ill", "well"), "a", 0, bytes(32), protected=True
        )
        assert data.places is not None
        assert all(row in data.test for row in range(20, rows))
        return [data.places[row].rpartition(" ")[2] for row in data.train.tolist()]

    for row in range(21):
        Image.fromarray(np.full((4, 4), 10 * row, dtype=np.uint8)).save(tmp_path / f"{row}.png")
    assert parts(20) == parts(21) != []
