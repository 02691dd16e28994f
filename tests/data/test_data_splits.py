"""The keyed split: what decides a record's part, and that one record moves no other."""

import hashlib
import hmac
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from perennial.data.config import DataConfig
from perennial.data.deployed import load_site
from perennial.data.federation import build
from perennial.data.sources import load
from perennial.data.splits import KeyedHash, derive_simulation_key, group_by_content, group_by_text
from perennial.data.tasks_config import TasksConfig
from tests.federations import resolved

ONE_TASK = TasksConfig(count=1, rounds=1, order="natural")
KEY = bytes(range(32))
Table = list[tuple[int, str, str]]
"""(number, category, label) of each record."""

records = st.lists(
    st.tuples(st.integers(0, 250), st.sampled_from(["f", "m", "?", "x1"]), st.sampled_from(["a", "b", "c"])),
    min_size=4,
    max_size=30,
    unique_by=lambda record: (record[0], record[1]),
)


def image(record: tuple[int, str, str]) -> np.ndarray:
    number, category, _ = record
    pixels = np.zeros((2, 2, 3), dtype=np.uint8)
    pixels[0, 0, 0], pixels[1, 1, 1] = number, ["f", "m", "?", "x1"].index(category)
    return pixels


def as_csv(root: Path, table: Table) -> dict[str, Any]:
    lines = [",".join(("size", "sex", "label")), *(",".join(map(str, record)) for record in table)]
    (root / "t.csv").write_text("\n".join(lines))
    return {"source": "csv", "path": str(root / "t.csv")}


def as_arrays(dtype: str) -> Callable[[Path, Table], dict[str, Any]]:
    def write(root: Path, table: Table) -> dict[str, Any]:
        x = np.stack([image(record) for record in table])
        x = (
            x
            if dtype == "uint8"
            else x.astype(np.float32).reshape(len(x), *([-1] if dtype == "rows" else x.shape[1:]))
        )
        np.savez(root / "t.npz", x=x, y=np.array([record[2] for record in table]))
        return {"source": "npz", "path": str(root / "t.npz")}

    return write


def as_folder(root: Path, table: Table) -> dict[str, Any]:
    for number, category, label in table:
        (root / label).mkdir(exist_ok=True)
        name = f"{number}-{category.replace('?', 'none')}.png"
        Image.fromarray(image((number, category, label))).save(root / label / name)
    return {"source": "folder", "path": str(root)}


def as_manifest(root: Path, table: Table) -> dict[str, Any]:
    lines = ["path,label"]
    for row, record in enumerate(table):
        Image.fromarray(image(record)).save(root / f"{row}.png")
        lines.append(f"{row}.png,{record[2]}")
    (root / "m.csv").write_text("\n".join(lines))
    return {"source": "folder", "path": str(root / "m.csv")}


WRITERS = {
    "csv": as_csv,
    "uint8": as_arrays("uint8"),
    "float": as_arrays("float"),
    "rows": as_arrays("rows"),
    "folder": as_folder,
    "manifest": as_manifest,
}


def parts_of(
    write: Callable[[Path, Table], dict[str, Any]], root: Path, table: Table, block: dict[str, Any]
) -> dict[tuple[int, str], tuple[str, ...]]:
    """Record -> the parts that it is in, as a whole federation and as a site see it."""
    root.mkdir()
    described = write(root, table)
    classes = sorted({label for _, _, label in table})
    config = DataConfig.model_validate({**described, **block, "sites": 1})
    source = load(config, 3)
    order = _order(source, table)
    federation = build(config, ONE_TASK, 3, source=source)
    site = next(iter(federation.sites.values()), None)
    found: dict[tuple[int, str], tuple[str, ...]] = {record[:2]: () for record in table}
    for part in ("train", "validation", "test"):
        rows = site.part(part).tolist() if site is not None else []
        if part == "test":
            rows = federation.test.test.tolist() if federation.test is not None else []
        for row in rows:
            found[table[order[row]][:2]] += (part,)
    if described["source"] != "csv" and "samples_limit" not in block:
        here = resolved(federation, config).model_copy(update={"sites": None})
        alone = load_site(here, classes, "a", 3, derive_simulation_key(3))
        for part in ("train", "validation", "test"):
            for row in alone.part(part).tolist():
                assert part in found[table[order[row]][:2]]
    return found


def _order(source: Any, table: Table) -> list[int]:
    """Row of the source -> row of the table: folders are read class by class."""
    wanted = source.train.split_groups()
    keys = source.train.keys
    if keys is None or keys[0][0].isdigit():
        return list(range(len(table)))
    names = [f"{label}/{number}-{sex.replace('?', 'none')}.png" for number, sex, label in table]
    assert len(wanted) == len(names)
    return [names.index(key) for key in keys]


CAPS: Sequence[dict[str, Any]] = (
    {},
    {"validation_fraction": 0.5, "test_fraction": 0.5},
    {"samples_limit": 0.5, "test_limit": 0.5},
)


@pytest.mark.parametrize("kind", WRITERS)
@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(table=records, position=st.integers(0, 29), block=st.sampled_from(CAPS), data=st.data())
def test_one_record_moves_no_other(
    kind: str, table: Table, position: int, block: dict[str, Any], data: st.DataObject, tmp_path_factory: Any
) -> None:
    root = tmp_path_factory.mktemp("split")
    position %= len(table)
    fewer = table[:position] + table[position + 1 :]
    if kind == "csv":
        fewer = data.draw(st.permutations(fewer))
    whole = parts_of(WRITERS[kind], root / "whole", table, block)
    without = parts_of(WRITERS[kind], root / "without", fewer, block)
    whole.pop(table[position][:2])
    assert without == whole


@pytest.mark.parametrize("block", [{"source": "digits"}, {"source": "synth_groups"}])
def test_one_record_of_a_benchmark_moves_no_other(block: dict[str, Any]) -> None:
    natural = block["source"] == "synth_groups"
    more = {"partition": {"kind": "natural"}} if natural else {"sites": 1, "samples_limit": 0.3}
    config = DataConfig.model_validate(block | more)
    source = load(config, 1)

    def parts(removed: int | None) -> dict[bytes, set[str]]:
        rows = [row for row in range(len(source.train)) if row != removed]
        less = replace(source, train=source.train.pick(torch.tensor(rows)))
        found: dict[bytes, set[str]] = {}
        for site in build(config, ONE_TASK, 1, source=less).sites.values():
            for part in ("train", "validation", "test"):
                for row in site.part(part).tolist():
                    found.setdefault(site.keyed.groups[row].tobytes(), set()).add(part)
        return found

    whole = parts(None)
    for removed in (0, 7, len(source.train) - 1):
        group = source.train.split_groups()[removed].tobytes()
        without = parts(removed)
        assert {key: part for key, part in whole.items() if key != group} == {
            key: part for key, part in without.items() if key != group
        }


def test_values_are_the_hash_that_is_stated() -> None:
    groups = group_by_content(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
    assert groups[1].tobytes() == hashlib.sha256(b"content:\x03\x04").digest()
    stated = hmac.digest(KEY, b"test:" + groups[1].tobytes(), "sha256")
    assert KeyedHash(KEY, groups).values("test", np.array([1])).tolist() == [int.from_bytes(stated[:8])]
    named = group_by_text("patient", ["Ann", "Ann", "Bo"])
    assert named[0].tobytes() == hashlib.sha256(b"patient:Ann").digest()
    assert (
        KeyedHash(KEY, named).number_groups(torch.tensor([0, 1, 2, 0])).tolist()[0:2]
        == [KeyedHash(KEY, named).number_groups(torch.tensor([0, 1, 2, 0])).tolist()[0]] * 2
    )


def test_purposes_and_keys_do_not_share_a_hash() -> None:
    keyed = KeyedHash(KEY, group_by_content(torch.arange(4000)[:, None]))
    rows = np.arange(4000)
    held = set(keyed.hold_out(rows, 0.2, "test")[0].tolist())
    for other in (
        keyed.hold_out(rows, 0.2, "exemplars")[0],
        keyed.hold_out(rows, 0.2, "validation")[0],
        replace(keyed, key=bytes(32)).hold_out(rows, 0.2, "test")[0],
    ):
        # 160 of 4,000 are in both where the two are independent; five standard deviations
        assert abs(len(held & set(other.tolist())) - 160) < 63


def test_copies_of_a_record_go_the_same_way_whatever_their_label() -> None:
    x = torch.arange(50).repeat(2)[:, None]
    test, _ = KeyedHash(KEY, group_by_content(x)).hold_out(np.arange(100), 0.5, "test")
    assert set((test % 50).tolist()) == set(test[test < 50].tolist())
    assert len(test) == 2 * len(test[test < 50]) > 0


def test_an_archive_s_order_decides_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 2, 2), dtype=np.uint8), np.arange(40) % 2
    held = []
    for name, order in (("a", np.arange(40)), ("b", rng.permutation(40))):
        path = tmp_path / f"{name}.npz"
        np.savez(path, x=x[order], y=y[order])
        assert zipfile.is_zipfile(path)
        config = DataConfig.model_validate({"source": "npz", "path": str(path), "sites": 1})
        test = build(config, ONE_TASK, 5).test
        assert test is not None
        held.append({test.sample_hash(row) for row in test.test.tolist()})
    assert held[0] == held[1]
