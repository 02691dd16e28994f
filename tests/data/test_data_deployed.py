"""A deployed site makes for itself the parts that its simulated twin has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perennial.data.config import DataConfig
from perennial.data.deployed import derive_fill, derive_input_shape, load_site, merge_site_config
from perennial.data.federation import build
from perennial.data.site import SiteData
from perennial.data.splits import derive_simulation_key
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, DataError

KEY = bytes(32)
TASKS = TasksConfig(count=2, rounds=1)
SITES = {"graz": 14, "linz": 3, "wien": 30}


def configure(**block: Any) -> DataConfig:
    return DataConfig.model_validate(block)


def contents(site: SiteData) -> list[list[tuple[str, int]]]:
    """What each part holds, in order."""
    parts = [site.train, site.validation, site.test]
    return [[(site.sample_hash(place), int(site.y[place])) for place in part.tolist()] for part in parts]


def photographs(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for site, count in SITES.items():
        for name in ("mel", "nv", "df"):
            (root / site / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / site / name / f"{index}.png")
    return root


@pytest.mark.parametrize("cached", [False, True])
def test_a_folder_at_a_site_is_split_as_in_simulation(tmp_path: Path, cached: bool) -> None:
    root = photographs(tmp_path / "all")
    experiment = configure(source="folder", path=str(root), image_size=4, partition={"kind": "natural"})
    simulated = build(experiment, TASKS, 5)
    for name in SITES:
        here = merge_site_config(experiment, configure(source="folder", path=str(root / name)))
        cache = tmp_path / "cache" / name if cached else None
        for _ in range(2):
            site = load_site(here, simulated.classes, name, 5, derive_simulation_key(5), cache)
            assert contents(site) == contents(simulated.site(name))
            assert site.mean.tolist() == simulated.mean.tolist()
    total = 3 * sum(SITES.values())
    assert sum(len(simulated.site(name).test) for name in SITES) == pytest.approx(0.2 * total, abs=14)


def test_a_table_at_a_site_is_split_and_read_as_in_simulation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.normal():.3f},{'mf'[rng.integers(2)]},{'abc'[rng.integers(3)]},{site}"
        for site, count in SITES.items()
        for _ in range(3 * count)
    ]
    (tmp_path / "all.csv").write_text("\n".join(["size,sex,label,site", *rng.permutation(rows).tolist()]))
    experiment = configure(
        source="csv",
        path=str(tmp_path / "all.csv"),
        site_column="site",
        partition={"kind": "natural"},
        columns={"size": "numeric", "sex": ["m", "f"]},
        normalise={"mean": {"size": 0.1}, "std": {"size": 2.0}},
    )
    simulated = build(experiment, TASKS, 5)
    for name in SITES:
        lines = (tmp_path / "all.csv").read_text().splitlines()
        own = [line for line in lines if line.endswith((",site", f",{name}"))]
        (tmp_path / f"{name}.csv").write_text("\n".join(own))
        alone = merge_site_config(experiment, configure(source="csv", path=str(tmp_path / f"{name}.csv")))
        among_all = merge_site_config(
            experiment, configure(source="csv", path=experiment.path, site_column="site")
        )
        for here in (alone, among_all):
            assert contents(
                load_site(here, simulated.classes, name, 5, derive_simulation_key(5))
            ) == contents(simulated.site(name))


def test_a_site_says_where_its_data_is_and_nothing_else(tmp_path: Path) -> None:
    experiment = configure(source="folder", classes=["melanoma", "naevus"], image_size=32, color="gray")
    here = configure(source="folder", path="/srv/skin", labels={"mel": "melanoma"})
    merged = merge_site_config(experiment, here)
    assert (merged.path, merged.labels, merged.size, merged.color) == (
        here.path,
        here.labels,
        (32, 32),
        "gray",
    )
    assert merged.classes == ("melanoma", "naevus")
    with pytest.raises(ConfigError, match=r"data\.image_size: found 64 .* but the experiment decides it"):
        merge_site_config(experiment, configure(source="folder", path="/srv/skin", image_size=64))
    with pytest.raises(ConfigError, match="do not fit: .*image_size belongs to source"):
        merge_site_config(experiment, configure(source="csv", path="/srv/skin.csv"))


def test_pixels_of_a_site_have_the_scale_of_the_experiment(tmp_path: Path) -> None:
    experiment = configure(
        source="npz", classes=["0", "1"], image_size=4, color="gray", normalise={"mean": 0.3, "std": 0.2}
    )
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 6, 6), dtype=np.uint8)
    y = np.arange(20) % 2
    for name, x in (("bytes", pixels), ("floats", pixels.astype(np.float32))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    here = merge_site_config(
        experiment, configure(source="npz", path=str(tmp_path / "bytes.npz"), classes=["0", "1"])
    )
    assert load_site(here, ("0", "1"), "wien", 0, KEY).input_shape == derive_input_shape(experiment)
    here = merge_site_config(
        experiment, configure(source="npz", path=str(tmp_path / "floats.npz"), classes=["0", "1"])
    )
    with pytest.raises(DataError, match=r"floats\.npz, x: .* ask for uint8 images"):
        load_site(here, ("0", "1"), "wien", 0, KEY)


def test_what_a_site_cannot_know_the_experiment_must_say(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("size,label\n1,a\n2,b\n")
    table = configure(source="csv", path=str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match=r"data\.columns: missing"):
        load_site(table, ("a", "b"), "wien", 0, KEY)
    with pytest.raises(ConfigError, match=r"data\.normalise: missing"):
        load_site(table.model_copy(update={"columns": {"size": "numeric"}}), ("a", "b"), "wien", 0, KEY)
    with pytest.raises(DataError, match="line 3: label 'b' is not in the registry"):
        load_site(table.model_copy(update={"columns": {"size": "numeric"}}), ("a", "c"), "wien", 0, KEY)


def test_classes_that_a_site_lacks_are_noted(tmp_path: Path) -> None:
    root = photographs(tmp_path)
    here = configure(source="folder", path=str(root / "linz"), samples_limit=5)
    site = load_site(here, ("nv", "bcc", "mel", "df"), "linz", 0, bytes([4] * 32))
    train, validation, test = (site.counts(part, 4).tolist() for part in ("train", "validation", "test"))
    assert (np.array(train) + validation + test).tolist() == [3, 0, 3, 3]
    assert (train, validation, test) == ([3, 0, 2, 3], [0, 0, 0, 0], [0, 0, 1, 0])
    assert site.notes == (
        "site 'linz' holds no sample of bcc",
        "site 'linz' has no validation sample of nv, mel, df: a hash of each record decides, whatever its "
        "class",
        "site 'linz' has no test sample of nv, df: a hash of each record decides, whatever its class",
        "data.samples_limit and test_limit are for simulation; this site uses all of its samples",
    )


def test_a_site_that_the_data_names_and_give_no_sample_is_told_so(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    np.savez(
        tmp_path / "a.npz",
        x=x,
        y=y,
        classes=["a", "b"],
        site=[0, 0, 1, 1],
        site_names=["wien", "graz", "linz"],
    )
    config = configure(source="npz", path=str(tmp_path / "a.npz"), normalise={"mean": [0, 0], "std": [1, 1]})
    with pytest.raises(DataError, match=r"site 'linz': no sample in .*a\.npz"):
        load_site(config, ("a", "b"), "linz", 0, KEY)


def test_a_table_declares_what_stands_for_missing_numbers_and_images_declare_nothing() -> None:
    assert derive_fill(configure(source="folder", classes=["a"], image_size=8)) is None
    table = configure(
        source="csv",
        classes=["a"],
        columns={"age": "numeric", "size": "numeric"},
        imputation={"age": 40, "size": 2.5},
    )
    fill = derive_fill(table)
    assert fill is not None and {40.0, 2.5} <= {*fill.tolist()}


def test_an_experiment_without_data_declares_its_inputs() -> None:
    assert derive_input_shape(configure(source="folder", classes=["a"], image_size=[8, 12])) == (3, 8, 12)
    gray = configure(source="folder", classes=["a"], image_size=8, color="gray")
    assert derive_input_shape(gray) == (1, 8, 8)
    columns = {"size": "numeric", "sex": ["m", "f"]}
    assert derive_input_shape(configure(source="csv", classes=["a"], columns=columns)) == (5,)
    with pytest.raises(ConfigError, match=r"data\.image_size: missing"):
        derive_input_shape(configure(source="folder", classes=["a"]))
    with pytest.raises(ConfigError, match=r"data\.columns: missing"):
        derive_input_shape(configure(source="csv", classes=["a"]))
