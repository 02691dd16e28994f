"""The same record is known again wherever it lies, and nobody without the site's key knows any."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perennial.data.config import DataConfig
from perennial.data.deployed import load_site, site_config
from perennial.data.splits import identities
from perennial.foundation.errors import StateError
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
    data = load_site(site_config(experiment, own), ("ill", "well"), "north", 0, bytes(32))
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
        identities(key, "record", contents),
        identities(record_key(tmp_path / "b"), "record", contents),
    )
    assert mine.shape == (3, 16) and not any(same(mine, theirs))
    assert not any(same(mine, identities(key, "place", contents)))


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
