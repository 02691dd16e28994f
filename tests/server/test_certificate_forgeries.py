"""Certificates that say something else than the run's record, its sums or its model are refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from perennial.foundation.errors import PerennialError
from perennial.learning.analytic.files import read_statistics_file, write_statistics
from perennial.learning.analytic.statistics import Statistics
from perennial.server.withdrawal import forget, verify
from perennial.strategies.statistics.kept import file_name
from tests.strategies.test_analytic_runs import own_cache, run

__all__ = ["own_cache"]
DATA = {"sites": 5, "partition": {"kind": "iid"}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}
WRONG = "0" * 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(folder, "one", data=DATA, tasks=TASKS)
    run(folder, "other", data=DATA, tasks=TASKS, seed=4)
    for name in ("one", "other"):
        forget(folder / "runs" / name, "site-2")
    return folder / "runs"


@pytest.fixture
def certificate(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs" / "one" / "certificates" / "forget-site-2.json"


FIELDS: dict[str, Any] = {
    "kind": "forget_group",
    "run": "1" * 16,
    "experiment": WRONG,
    "site": "site-3",
    "number": 7,
    "time": "2020-01-01T00:00:00+00:00",
    "sums_before": WRONG,
    "sums_after": WRONG,
    "subtracted": WRONG,
    "by_task": {},
    "classes_removed": ["7"],
    "shrinkage": 0.02,
    "model": WRONG,
    "finished": False,
    "not_undone": [],
    "note": "and everything else was undone too",
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_edited_field_is_refused(certificate: Path, field: str) -> None:
    content = json.loads(certificate.read_text())
    assert content.get(field) != FIELDS[field]
    certificate.write_text(json.dumps(content | {field: FIELDS[field]}))
    with pytest.raises(PerennialError):
        verify(certificate)


def counted_twice(folder: Path) -> None:
    first, second = (
        sorted((folder / "statistics").glob("site-0-*"))[0],
        folder / "statistics" / "x.safetensors",
    )
    shutil.copy(first, second)


def of_the_other_run(folder: Path) -> None:
    shutil.copy(folder.parent / "other" / "certificates" / "forget-site-2.json", folder / "certificates")


def invented_file(folder: Path) -> None:
    for path in (folder.parent / "other" / "statistics").glob("site-0-*"):
        shutil.copy(path, folder / "statistics")


def places_changed(folder: Path) -> None:
    first, second = (folder / "statistics" / file_name(1, site) for site in ("site-0", "site-1"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def owners_changed(folder: Path) -> None:
    paths = [folder / "statistics" / file_name(1, site) for site in ("site-0", "site-1")]
    found = [read_statistics_file(path) for path in paths]
    for path, (statistics, _), (_, facts) in zip(paths, reversed(found), found, strict=True):
        write_statistics(path, statistics, facts)


def moved_between_sites(folder: Path) -> None:
    """Their sum is as it was: what one site has more, the other has less."""
    paths = [folder / "statistics" / file_name(1, site) for site in ("site-0", "site-1")]
    (mine, facts), (yours, others) = (read_statistics_file(path) for path in paths)
    nothing = Statistics.nothing(mine.width, mine.classes)
    write_statistics(paths[0], mine + yours, facts)
    write_statistics(paths[1], nothing, others)


def missing_file(folder: Path) -> None:
    sorted((folder / "statistics").glob("site-1-*"))[0].unlink()


def other_model(folder: Path) -> None:
    shutil.copy(folder.parent / "other" / "model.safetensors", folder / "model.safetensors")


def an_old_head(folder: Path) -> None:
    (folder / "versions").mkdir()
    facts = {"facts": json.dumps({"sites": ["site-0", "site-2"]})}
    save_file({"head.bias": zeros(2)}, folder / "versions" / "round-000001.safetensors", facts)


def a_site_that_never_was(folder: Path) -> None:
    path = folder / "certificates" / "forget-site-2.json"
    path.write_text(path.read_text().replace("site-2", "st-nowhere"))


def nothing_at_all(folder: Path) -> None:
    (folder / "certificates" / "forget-site-2.json").write_text("{}")


def no_json(folder: Path) -> None:
    (folder / "certificates" / "forget-site-2.json").write_text("withdrawn, honestly")


FORGERIES = (
    counted_twice,
    of_the_other_run,
    invented_file,
    places_changed,
    owners_changed,
    moved_between_sites,
    missing_file,
    other_model,
    an_old_head,
    a_site_that_never_was,
    nothing_at_all,
    no_json,
)


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda each: each.__name__)
def test_a_forgery_is_refused(certificate: Path, forgery: Callable[[Path], None]) -> None:
    assert verify(certificate)
    forgery(certificate.parent.parent)
    with pytest.raises(PerennialError):
        verify(certificate)


def test_an_honest_certificate_holds_after_more_withdrawals(certificate: Path) -> None:
    folder = certificate.parent.parent
    for count, site in enumerate(("site-0", "site-4"), 1):
        second = forget(folder, site)
        assert any(f"{count} more withdrawals" in line for line in verify(certificate))
        assert not any("more withdrawals" in line for line in verify(second))
