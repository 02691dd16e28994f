"""Tables: columns, missing values, separators, and the lines of what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perennial.data.config import DataConfig
from perennial.data.deployed import derive_constants, derive_input_shape
from perennial.data.federation import build
from perennial.data.samples import Source, fill_missing
from perennial.data.sources import load
from perennial.data.table_columns import count_features, locate_numbers
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, DataError
from tests.federations import resolved


def read(path: Path, **block: Any) -> Source:
    return load(DataConfig.model_validate({"source": "csv", "path": str(path), **block}), seed=0)


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


PATIENTS = """age, sex ,label,site
50,f,mel,wien
NA,m,nv,graz
30,,mel,wien
41.5,x,nv,graz
"""


def test_columns_become_numbers_indicators_and_one_hot_codes(tmp_path: Path) -> None:
    columns = {"sex": ["m", "f"], "age": "numeric"}
    source = read(write(tmp_path, PATIENTS), columns=columns, site_column="site")
    assert source.columns is not None and source.train.site is not None
    assert (count_features(source.columns), locate_numbers(source.columns)) == (5, {"age": 3})
    expected = [
        [0, 1, 0, 50, 0],
        [1, 0, 0, np.nan, 1],
        [0, 0, 1, 30, 0],
        [0, 0, 1, 41.5, 0],
    ]
    assert source.train.x.dtype == torch.float32
    assert np.array_equal(source.train.x.numpy(), np.array(expected, dtype=np.float32), equal_nan=True)
    assert source.train.y.tolist() == [0, 1, 0, 1]
    assert (source.train.site_names, source.train.site.tolist()) == (("graz", "wien"), [1, 0, 1, 0])
    assert np.array_equal(source.mean.numpy(), [0, 0, 0, np.nan, 0], equal_nan=True)
    assert np.array_equal(source.std.numpy(), [1, 1, 1, np.nan, 1], equal_nan=True)


CONFUSING = """sex,age,age missing,label
m,50,2,a
f,NA,4,b
other,30,NA,a
,40,6,b
"""


def test_a_category_called_other_and_a_column_called_as_an_indicator_have_their_own_places(
    tmp_path: Path,
) -> None:
    config = DataConfig(source="csv", path=str(write(tmp_path, CONFUSING)), sites=1, test_fraction=0)
    source = load(config, 0)
    assert source.columns == {"sex": ("f", "m", "other"), "age": "numeric", "age missing": "numeric"}
    nan = np.nan
    expected = [
        [0, 1, 0, 0, 50, 0, 2, 0],
        [1, 0, 0, 0, nan, 1, 4, 0],
        [0, 0, 1, 0, 30, 0, nan, 1],
        [0, 0, 0, 1, 40, 0, 6, 0],
    ]
    assert np.array_equal(source.train.x.numpy(), np.array(expected, dtype=np.float32), equal_nan=True)
    assert np.array_equal(source.mean.numpy(), [0, 0, 0, 0, nan, 0, nan, 0], equal_nan=True)
    federation = build(config, TasksConfig(count=2, rounds=1), 1)
    assert federation.mean.tolist() == [0, 0, 0, 0, 40, 0, 4, 0]
    described = resolved(federation, config)
    assert described.normalise is not None and described.normalise.mean == {"age": 40, "age missing": 4}
    assert load(described, 0).mean.tolist() == federation.mean.tolist()
    declared = described.model_copy(update={"path": None})
    assert derive_input_shape(declared) == (8,)
    assert derive_constants(declared)[0].tolist() == federation.mean.tolist()


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_is_that_of_the_header(tmp_path: Path, separator: str) -> None:
    text = PATIENTS.replace(",", separator)
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8-sig")
    assert read(path, columns={"age": "numeric"}).train.x[3].tolist() == [41.5, 0]


def test_the_experiment_s_constants_are_used_by_column_name(tmp_path: Path) -> None:
    normalise = {"mean": {"age": 40}, "std": {"age": 10}}
    source = read(write(tmp_path, PATIENTS), columns={"age": "numeric"}, normalise=normalise)
    assert (source.mean.tolist(), source.std.tolist()) == ([40, 0], [10, 1])
    fill_missing(source.train.x, source.mean)
    assert ((source.train.x - source.mean) / source.std)[1].tolist() == [0, 1]
    for names, words in (
        ({"age": 1, "agee": 1}, "'agee' is no numeric column .did you mean 'age'"),
        ({"sex": 1}, "'sex' is no numeric column"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(tmp_path / "table.csv", columns={"age": "numeric"}, normalise={"mean": names, "std": names})
    two = {"age": "numeric", "age2": "numeric"}
    with pytest.raises(ConfigError, match="the numeric column 'age2' is missing"):
        read(write(tmp_path, "age,age2,label\n1,2,x\n"), columns=two, normalise=normalise)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "a,label\n1,x\n2,z\n",
            {"classes": ["x", "y"]},
            r"table\.csv, line 3: label 'z' is not in the registry",
        ),
        ("a,label\n1,x\n2,\n", {}, "line 3: the label is empty"),
        ("a,label\n1,x\n2,NaN\n", {}, "line 3: the label is empty, 'NaN'; if that is a class, list it"),
        ("a,label\n1,x\n2,NA\n", {"classes": ["x"]}, "line 3: the label is empty, 'NA'"),
        (
            "a,label\n1,x\noops,x\n",
            {"columns": {"a": "numeric"}},
            "column 'a', line 3: 'oops' is not a number",
        ),
        ("a,label\n1,x\ninf,x\n", {}, "column 'a', line 3: 'inf' is not a finite number"),
        ("a,label\n1e99,x\n", {}, "line 2: '1e99' is not a finite number"),
        ("a,label\n1,x\n\n1\n", {}, "line 4: 1 values for 2 columns"),
        ("a,lable\n1,x\n", {}, "no column 'label' .did you mean 'lable'"),
        ("a,label\n1,x\n", {"columns": {"b": "numeric"}}, r"no column 'b'; data.columns lists it"),
        ("a,label\n1,x\n", {"site_column": "site"}, "no column 'site'"),
        ("a,site,label\n1,w,x\n1,,x\n", {"site_column": "site"}, "line 3: the site is empty"),
        ("a,a,label\n1,1,x\n", {}, "must name every column once"),
        ("a,label\n", {}, "the table has no row"),
        ("", {}, "the table has no row"),
        ("label\nx\n", {}, "no feature beside the label"),
        ("id,label\n" + "".join(f"p{i},x\n" for i in range(101)), {}, "column 'id' has 101 distinct texts"),
    ],
)
def test_a_wrong_table_names_its_line(tmp_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(write(tmp_path, text), **options)


def test_a_file_that_is_no_table_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv: cannot be read .No such file"):
        read(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"cannot be read .Is a directory"):
        read(tmp_path)
    (tmp_path / "table.csv").write_bytes(b"a,label\n\x81\x8d,x\n")
    with pytest.raises(DataError, match="not a CSV file in UTF-8"):
        read(tmp_path / "table.csv")
    (tmp_path / "table.csv").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(DataError, match="a workbook or an archive; save the sheet as CSV"):
        read(tmp_path / "table.csv")
    (tmp_path / "table.csv").write_bytes("a,label\n1,x\n".encode("utf-16-be"))
    with pytest.raises(DataError, match=r"null characters.*save it so"):
        read(tmp_path / "table.csv")
