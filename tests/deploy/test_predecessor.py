"""Whether a site's last SuperNode has certainly ended, so that the next one may sign off for it."""

import shutil
from pathlib import Path

import pytest

from perennial.deploy import predecessor
from perennial.deploy.predecessor import RECORD, left_node, note_node, place
from perennial.foundation.files import sole_owner

NODE = 2**63 + 5


def test_a_node_is_left_once_its_supernode_has_ended(tmp_path: Path) -> None:
    assert left_node(tmp_path) is None
    with sole_owner(place(tmp_path), "the SuperNode"):
        note_node(tmp_path, NODE)
        assert left_node(tmp_path) is None
    assert left_node(tmp_path) == NODE


def test_a_copied_folder_is_nobodys_successor(tmp_path: Path) -> None:
    note_node(tmp_path / "graz", NODE)
    shutil.copytree(tmp_path / "graz", tmp_path / "copy")
    assert left_node(tmp_path / "graz") == NODE and left_node(tmp_path / "copy") is None


@pytest.mark.parametrize("boot", ["another", ""])
def test_after_a_restart_of_the_machine_nothing_is_certain(
    tmp_path: Path, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_node(tmp_path, NODE)
    found = tmp_path / "boot_id"
    if boot:
        found.write_text(boot)
    monkeypatch.setattr(predecessor, "BOOT", found)
    assert left_node(tmp_path) is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"node": "x", "here": ""}', '{"node": null, "here": 1}']
)
def test_a_damaged_record_says_nothing(tmp_path: Path, content: str) -> None:
    note_node(tmp_path, NODE)
    (place(tmp_path) / RECORD).write_text(content)
    assert left_node(tmp_path) is None
