"""What sites signed decides which model verifies: an operator's own settings, sums or names do not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from perennial.foundation.errors import PerennialError, StateError
from perennial.learning.analytic.statistics import read_statistics_file, write_statistics
from perennial.models.saved import GLOBAL_MODEL
from perennial.privacy.secure.keys import derive_signing_key, draw_secret, sign
from perennial.privacy.signed_sums import Statement
from perennial.server.opened_run import OpenedRun
from perennial.server.verification import STATEMENTS, verify
from tests.strategies.test_analytic_runs import own_cache, run

__all__ = ["own_cache"]
DATA = {"sites": 3, "partition": {"kind": "iid"}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(folder, "one", data=DATA, tasks=TASKS)
    verify(folder / "runs" / "one")
    return folder / "runs" / "one"


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "one")
    return tmp_path / "one" / STATEMENTS


def edit(file: Path, **changes: Any) -> dict[str, Any]:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))
    return content


def said_by(key: bytes, statement: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A statement with changes, signed by the holder of a key."""
    unsigned = replace(Statement.from_json(statement), key=derive_signing_key(key), signature="", **changes)
    return asdict(replace(unsigned, signature=sign(key, unsigned.content)))


def test_an_honest_file_holds_with_the_keys_that_are_known(file: Path) -> None:
    rows = json.loads(file.read_text())["signers"]
    known = {site: [key] for site, key, _ in rows}
    assert "6 signed sums of 3 sites" in verify(file, known)[0]
    with pytest.raises(StateError, match="site-0, task 1: its key is not in your list"):
        verify(file, known | {"site-0": ["0" * 64]})


def other_settings(file: Path) -> str:
    """An operator solves the sites' sums by settings of its own, and says that these were the run's."""
    content = json.loads(file.read_text())
    opened = OpenedRun.open(file.parent)
    strategy = content["strategy"] | {"head": "ridge", "shrinkage": 4.0}
    opened.experiment = opened.experiment.model_validate(
        opened.experiment.model_dump(mode="json") | {"strategy": strategy}
    )
    edit(file, strategy=opened.experiment.strategy.model_dump(mode="json"), shrinkage=4.0)
    return "its site signed other settings"


def a_changed_shrinkage(file: Path) -> str:
    edit(file, shrinkage=0.9)
    return "is not what the sums give"


def an_edited_statement(file: Path) -> str:
    content = json.loads(file.read_text())
    content["statements"][0]["task"] = 7
    edit(file, statements=content["statements"])
    return "its signature is not of its key"


def an_invented_site(file: Path) -> str:
    content, key = json.loads(file.read_text()), draw_secret()
    edit(file, statements=[*content["statements"], said_by(key, content["statements"][0], site="st-9")])
    return "its key is not in the list of signers"


def a_key_put_into_the_list(file: Path) -> str:
    """It changes the list that every honest site signed."""
    content, key = json.loads(file.read_text()), draw_secret()
    invented = said_by(key, content["statements"][0], site="st-9")
    edit(
        file,
        signers=[["st-9", derive_signing_key(key), ""], *content["signers"]],
        statements=[*content["statements"], invented],
    )
    return "not in the list of signers"


def a_site_twice(file: Path) -> str:
    content = json.loads(file.read_text())
    edit(file, statements=[*content["statements"], content["statements"][0]])
    return "counts twice"


def a_site_left_out(file: Path) -> str:
    content = json.loads(file.read_text())
    edit(file, statements=[row for row in content["statements"] if row["site"] != "site-1"])
    return "no statement is of these sums"


def other_sums(file: Path) -> str:
    path = sorted((file.parent / "statistics").glob("*.safetensors"))[0]
    sums, facts = read_statistics_file(path)
    write_statistics(path, replace(sums, counts=sums.counts + 1), facts)
    return "not the sums that"


def another_order(file: Path) -> str:
    content = json.loads(file.read_text())
    edit(file, classes=content["classes"][::-1])
    return "of another order of classes"


def another_model(file: Path) -> str:
    shutil.copy(file.parent / "checkpoint" / "latest.safetensors", file.parent / GLOBAL_MODEL)
    return "model.safetensors"


def nobody(file: Path) -> str:
    edit(file, statements=[])
    return "a model of nothing is none"


FORGERIES: list[Callable[[Path], str]] = [
    other_settings,
    a_changed_shrinkage,
    an_edited_statement,
    an_invented_site,
    a_key_put_into_the_list,
    a_site_twice,
    a_site_left_out,
    other_sums,
    another_order,
    another_model,
    nobody,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forgery_is_refused_by_name(file: Path, forge: Callable[[Path], str]) -> None:
    why = forge(file)
    with pytest.raises(PerennialError, match=why):
        verify(file)


def test_one_site_whose_key_signs_other_settings_is_named(file: Path) -> None:
    content = json.loads(file.read_text())
    key = (file.parent / "sites" / "site-1" / "secure" / "identity.key").read_bytes()
    changed = [
        said_by(key, row, settings="0" * 64) if row["site"] == "site-1" else row
        for row in content["statements"]
    ]
    edit(file, statements=changed)
    with pytest.raises(StateError, match="statement of site-1, task 1: its site signed other settings"):
        verify(file)
