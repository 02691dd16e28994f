"""Where the experiments that come with Perennial read their data."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.table import tables
from perennial.config.experiment import load_experiment
from perennial.config.run import find_experiment

ROOT = Path(__file__).resolve().parents[2]
PACKS = ROOT.parent / "shared" / "data"


def data_of(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text())["data"]
    return data if isinstance(data, dict) else {}


WITH_PATH = sorted(path for path in ROOT.glob("experiments/**/*.yaml") if "path" in data_of(path))


@pytest.mark.parametrize("path", WITH_PATH, ids=lambda path: path.stem)
def test_an_experiment_finds_its_data_from_any_working_folder(path: Path) -> None:
    """What is downloaded goes where the experiment is run, to a folder that git and Docker ignore."""
    data = data_of(path)
    if data.get("download"):
        assert f"/{data['path']}/" in (ROOT / ".gitignore").read_text().splitlines()
        assert f"!{data['path']}" not in (ROOT / ".dockerignore").read_text().splitlines()
    else:
        # `experiments` links into the package; the packs' own folder may be a link, and is not resolved
        assert Path(os.path.normpath(path.parent.resolve() / data["path"])).parent == PACKS


@pytest.mark.skipif(not PACKS.exists(), reason="the benchmark packs are not here")
def test_every_pack_is_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = [path for path in WITH_PATH if not data_of(path).get("download")]
    assert len(read) > 10
    for path in read:
        config = load_experiment(path)
        assert config.data is not None and Path(str(config.data.path)).is_file(), path
    changed = [row for table in tables().values() for row in table.rows if "path:" in ";".join(row.changes)]
    assert changed
    for row in changed:
        data = row.load(1).data
        assert data is not None and Path(str(data.path)).is_file(), row


def test_a_shipped_experiment_has_a_name_and_a_file_of_that_name_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_experiment(find_experiment(Path("quickstart"))).name == "quickstart"
    assert find_experiment(Path("quickstrt")) == Path("quickstrt")
    assert find_experiment(Path("elsewhere/quickstart")) == Path("elsewhere/quickstart")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("name: mine")
    assert find_experiment(Path("quickstart")) == Path("quickstart")
