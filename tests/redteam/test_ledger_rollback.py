"""Nobody gets a budget back by deleting, cutting, editing or replacing a ledger, nor by a crash."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from perennial.config.site import SiteConfig, load_site_config
from perennial.deploy.bundle import open_bundle, write_bundle
from perennial.deploy.certificates import encode_public_line, make_node_key
from perennial.deploy.federation import Federation, create_operator_folder
from perennial.foundation.errors import ConfigError, PrivacyError, StateError
from perennial.privacy import ledger as ledger_module
from perennial.privacy import ledger_lines
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.privacy.ledger_tip import (
    MOST_GUARANTEES,
    Tip,
    TipPosition,
    add_release,
    hash_totals,
    require_own_data,
)
from tests.forks import run_code
from tests.privacy.budgets import budget_for

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Attack = Callable[[Ledger, bytes], object]


def update(run: str = "r", noise: float = 4.0) -> Entry:
    return Entry(
        run=run,
        experiment="e",
        recipient="server",
        kind="update",
        unit="site",
        relation="replace",
        mechanism="gaussian",
        noise_multiplier=noise,
        sample_rate=1.0,
        steps=1,
    )


LIMIT = budget_for([update()] * 4, 1e-5)
"""Four releases and no more."""


def test_a_commitment_is_the_one_that_earlier_versions_wrote() -> None:
    """Ledgers on disks hold commitments; another order of the same totals would break every chain."""
    assert hash_totals({update(noise=9.0): 3, update(): 2, update("s"): 1}) == (
        "a52646ebec48f51c8a1ce5ed741ec09a20ce70236cd776436a852b94fb0f7115"
    )


def spent(folder: Path, *, elsewhere: bool = True) -> tuple[Ledger, bytes]:
    """A site that has spent its budget, and its ledger as it was after two releases."""
    second = folder / "other-disk" / "tip" if elsewhere else None
    (folder / "other-disk").mkdir(parents=True)
    ledger = Ledger(folder / "state", second)
    for _ in range(2):
        ledger.charge(update(), LIMIT)
    older = ledger.path.read_bytes()
    for _ in range(2):
        ledger.charge(update(), LIMIT)
    with pytest.raises(PrivacyError, match="limit"):
        ledger.charge(update(), LIMIT)
    return ledger, older


def rewritten(ledger: Ledger) -> bytes:
    """A ledger of one release, chained as it must be, by somebody who knows the format."""
    forged = Ledger(ledger.path.parent.parent / "forged")
    forged.charge(update("forged"))
    return forged.path.read_bytes()


def edited(ledger: Ledger) -> bytes:
    return ledger.path.read_bytes().replace(b'"noise_multiplier":4.0', b'"noise_multiplier":9.0')


ATTACKS: dict[str, Attack] = {
    "delete": lambda ledger, older: ledger.path.unlink(),
    "empty": lambda ledger, older: ledger.path.write_bytes(b""),
    "truncate": lambda ledger, older: os.truncate(ledger.path, len(older)),
    "older copy": lambda ledger, older: ledger.path.write_bytes(older),
    "edit": lambda ledger, older: ledger.path.write_bytes(edited(ledger)),
    "write anew": lambda ledger, older: ledger.path.write_bytes(rewritten(ledger)),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["one tip", "two tips"])
def test_a_changed_ledger_gives_no_budget_back(tmp_path: Path, attack: str, elsewhere: bool) -> None:
    ledger, older = spent(tmp_path, elsewhere=elsewhere)
    ATTACKS[attack](ledger, older)
    for use in (lambda: ledger.charge(update(), LIMIT), lambda: ledger.cost(1e-5), ledger.read_entries):
        with pytest.raises(StateError, match="so nothing may leave.*A lost ledger|changed or removed"):
            use()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_tip_elsewhere_notices_who_has_the_whole_state_folder(tmp_path: Path, attack: str) -> None:
    ledger, older = spent(tmp_path)
    ATTACKS[attack](ledger, older)
    ledger.beside.unlink()
    with pytest.raises(StateError, match="other-disk/tip has noted|changed or removed"):
        ledger.charge(update(), LIMIT)


def test_what_is_left_is_a_ledger_rolled_back_with_every_tip(tmp_path: Path) -> None:
    """Stated, not defended: docs/privacy.md says it. Who can write both places can restore both."""
    ledger = Ledger(tmp_path / "state", tmp_path / "tip")
    ledger.charge(update(), LIMIT)
    copies = {path: path.read_bytes() for path in (ledger.path, ledger.beside, tmp_path / "tip")}
    ledger.charge(update(), LIMIT)
    for path, data in copies.items():
        path.write_bytes(data)
    assert len(ledger.read_entries()) == 1


def test_totals_in_a_tip_are_believed_only_if_the_ledger_vouches_for_them(tmp_path: Path) -> None:
    ledger, _ = spent(tmp_path, elsewhere=False)
    tip = Tip.read(ledger.beside)
    assert tip is not None and tip.releases == 4
    Tip(tip.mark, {next(iter(tip.totals)): 1}, tip.newest, tip.checked).write(ledger.beside, durable=True)
    with pytest.raises(PrivacyError, match="limit"):
        ledger.charge(update(), LIMIT)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"mark": {}}', b"[" * 100_000, b'{"totals":[[{},1]]}'])
def test_a_damaged_tip_beside_the_ledger_is_rebuilt_and_one_elsewhere_refuses(
    tmp_path: Path, damage: bytes
) -> None:
    ledger, _ = spent(tmp_path)
    ledger.beside.write_bytes(damage)
    with pytest.raises(PrivacyError, match="limit"):
        ledger.charge(update(), LIMIT)
    (tmp_path / "other-disk" / "tip").write_bytes(damage)
    with pytest.raises(StateError, match="not a ledger's tip"):
        ledger.charge(update(), LIMIT)


def test_a_tip_that_was_lost_is_noted_anew_by_hand(tmp_path: Path) -> None:
    with_tip = Ledger(tmp_path / "state", tmp_path / "tip")
    with_tip.charge(update())
    (tmp_path / "tip").unlink()
    with pytest.raises(StateError, match="ledger_tip: no file .*restart-ledger --as-it-is"):
        with_tip.charge(update())
    assert with_tip.record_tip() == 1
    with_tip.charge(update())
    assert len(with_tip.read_entries()) == 2


def test_a_ledger_of_an_earlier_release_gets_its_tip_elsewhere_by_itself(tmp_path: Path) -> None:
    Ledger(tmp_path / "state").charge(update())
    with_tip = Ledger(tmp_path / "state", tmp_path / "tips" / "tip")
    with_tip.charge(update())
    (tmp_path / "tips" / "tip").unlink()
    with pytest.raises(StateError, match="ledger_tip: no file"):
        with_tip.charge(update())


def site_file(folder: Path, name: str = "north", **keys: object) -> Path:
    """A site.yaml with a policy and data, and otherwise the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "visits.csv").touch()
    content = {"site": name, "state_dir": "state", "data": {"source": "csv", "path": "visits.csv"}, **keys}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    return folder / "site.yaml"


@pytest.mark.parametrize("keys", [{}, {"ledger_tip": "tip/ledger.tip"}], ids=["default", "the template's"])
def test_a_state_folder_from_a_backup_is_refused_by_default(tmp_path: Path, keys: dict[str, Any]) -> None:
    ledger = load_site_config(site_file(tmp_path, **keys)).ledger
    ledger.charge(update())
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    ledger.charge(update())
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path / "backup", tmp_path / "state")
    with pytest.raises(StateError, match="lacks line 2"):
        load_site_config(tmp_path / "site.yaml").ledger.charge(update())


def test_a_tip_in_the_folder_that_a_backup_restores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ledger_tip: found .*lies in state_dir"):
        load_site_config(site_file(tmp_path, ledger_tip="state/tip"))


def test_the_template_of_a_site_names_a_tip_outside_its_state() -> None:
    template = yaml.safe_load(
        (RESULTS.parents[1] / "deploy" / "site" / "site.yaml").read_text().replace("@", "")
    )
    assert template["ledger_tip"] == "tip/ledger.tip" and template["state_dir"] == "state"


@pytest.mark.parametrize("way", ["the same path", "a link", "another name"])
def test_a_second_ledger_of_the_same_data_is_refused(tmp_path: Path, way: str) -> None:
    first = load_site_config(site_file(tmp_path / "a"))
    first.ledger.charge(update())
    other = {"the same path": tmp_path / "a" / "visits.csv"}.get(way, tmp_path / "again.csv")
    if way == "a link":
        other.symlink_to(tmp_path / "a" / "visits.csv")
    elif way == "another name":
        os.link(tmp_path / "a" / "visits.csv", other)
    data = {"source": "csv", "path": str(other)}
    second = site_file(tmp_path / "b", "south", data=data)
    with pytest.raises(StateError, match=f"counted by the ledger in {tmp_path}/a/state"):
        load_site_config(second).ledger.charge(update())
    shared = site_file(tmp_path / "b", "south", data=data, state_dir=str(tmp_path / "a" / "state"))
    load_site_config(shared).ledger.charge(update())
    assert len(first.ledger.read_entries()) == 2, "one ledger counts both"


def test_two_sites_of_the_template_on_one_file_share_no_budget(tmp_path: Path) -> None:
    """Each has its ledger_tip in its own folder, and so has nothing there that the other one could see."""
    federation = Federation(name="test", hosts=("fl.example.org",), runtime="process")
    operator = create_operator_folder(tmp_path / "federation", federation, 30)
    (tmp_path / "visits.csv").touch()
    opened: list[SiteConfig] = []
    for name in ("graz", "linz"):
        operator.add_site(name, encode_public_line(make_node_key()))
        open_bundle(write_bundle(operator, name), tmp_path / name)
        path = tmp_path / name / "site.yaml"
        content = yaml.safe_load(path.read_text())
        content["data"] = {"source": "csv", "path": str(tmp_path / "visits.csv")}
        path.write_text(yaml.safe_dump(content))
        opened.append(load_site_config(path))
    first, second = opened
    assert first.ledger_tip == tmp_path / "graz" / "tip" / "ledger.tip"
    first.ledger.charge(update())
    with pytest.raises(StateError, match=f"counted by the ledger in {tmp_path}/graz/state"):
        second.ledger.charge(update())
    assert not second.ledger.started
    first.ledger.charge(update())
    # a copied folder is another ledger, and so is one that stands at the same path in another container
    shutil.copytree(tmp_path / "graz" / "state", tmp_path / "copy")
    with pytest.raises(StateError, match="one data set has one ledger"):
        require_own_data(tmp_path / "visits.csv", tmp_path / "copy")
    (tmp_path / "graz" / "state" / "ledger.number").unlink()
    with pytest.raises(StateError, match="one data set has one ledger"):
        first.ledger.charge(update())


@pytest.mark.parametrize("home", ["none", "not absolute", "read-only"])
def test_nothing_leaves_where_no_other_site_would_know_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """Containers have an empty HOME, or one that cannot be written."""
    ledger = load_site_config(site_file(tmp_path, ledger_tip="tip/ledger.tip")).ledger
    monkeypatch.setenv("XDG_STATE_HOME", "state" if home == "not absolute" else "")
    if home == "none":
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (tmp_path / "home").touch()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(StateError, match="Set XDG_STATE_HOME to the absolute path"):
        ledger.charge(update())
    assert not ledger.started
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "shared"))
    ledger.charge(update())


def test_a_ledger_that_moved_takes_its_data_along(tmp_path: Path) -> None:
    load_site_config(site_file(tmp_path, ledger_tip="tip")).ledger.charge(update())
    (tmp_path / "state").rename(tmp_path / "moved")
    moved = load_site_config(site_file(tmp_path, state_dir="moved", ledger_tip="tip")).ledger
    moved.charge(update())
    assert len(moved.read_entries()) == 2


def test_a_lost_ledger_is_begun_anew_with_what_was_spent(tmp_path: Path) -> None:
    ledger, _ = spent(tmp_path)
    cost = ledger.cost(1e-5, "rdp")
    ledger.path.unlink()
    lost, carried = ledger.restart()
    assert carried == 4 and lost.exists()
    assert ledger.cost(1e-5, "rdp") == cost
    with pytest.raises(PrivacyError, match="limit"):
        ledger.charge(update(), LIMIT)
    ledger.charge(update())
    assert ledger.cost(1e-5).releases == 5 and len(ledger.read_entries()) == 1
    for tip in (ledger.beside, tmp_path / "other-disk" / "tip"):
        tip.unlink()
    with pytest.raises(StateError, match="nothing is known"):
        ledger.restart()


def test_carried_totals_stand_in_a_first_line_alone(tmp_path: Path) -> None:
    ledger, _ = spent(tmp_path, elsewhere=False)
    position, _ = ledger.mark() or pytest.fail("no tip")
    ledger.beside.unlink()
    line_before = position.last
    line = {"previous": line_before, "totals": hash_totals({}), "carried": []}
    with ledger.path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(StateError, match="line 5 does not follow"):
        ledger.charge(update(), LIMIT)


KILLED = """
import os, signal, sys
from pathlib import Path
from perennial.privacy import ledger_tip
from perennial.privacy.ledger import Ledger
from tests.redteam.test_ledger_rollback import update
calls = 0
write = ledger_tip.Tip.write
def dying(self, path, *, durable):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, path, durable=durable)
ledger_tip.Tip.write = dying
Ledger(Path(sys.argv[1]) / "state", Path(sys.argv[1]) / "tip").charge(update())
print("left")
"""


@pytest.mark.parametrize("moment", [1, 2], ids=["before both tips", "between the tips"])
def test_a_kill_between_the_writes_neither_locks_the_site_nor_gives_budget_back(
    tmp_path: Path, moment: int
) -> None:
    ledger = Ledger(tmp_path / "state", tmp_path / "tip")
    ledger.charge(update())
    run = run_code(KILLED, str(tmp_path), str(moment))
    assert run.returncode == -9 and "left" not in run.stdout
    assert ledger.cost(1e-5).releases == 2
    ledger.charge(update())
    assert ledger.cost(1e-5).releases == len(ledger.read_entries()) == 3
    for path in (ledger.beside, tmp_path / "tip"):
        tip = Tip.read(path)
        assert tip is not None and tip.releases == 3


def test_a_full_disk_elsewhere_stops_the_release_and_not_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "state", tmp_path / "full" / "tip")
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "make_folder", lambda folder: (tmp_path / "state").mkdir(exist_ok=True))
        with pytest.raises(StateError, match="ledger_tip: .*must not leave"):
            ledger.charge(update())
    with pytest.raises(StateError, match="ledger_tip: no file"):
        ledger.charge(update())
    assert ledger.record_tip() == 1, "counted although it did not leave"
    ledger.charge(update())
    assert ledger.cost(1e-5).releases == 2


def test_processes_at_once_share_the_tips(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def charge() -> None:
        for _ in range(3):
            try:
                Ledger(tmp_path / "state", tmp_path / "tip").charge(update(), LIMIT)
            except PrivacyError as error:
                refused.append(error)

    threads = [Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Ledger(tmp_path / "state", tmp_path / "tip").read_entries()) == 4
    assert len(refused) == 8


def long_ledger(folder: Path, count: int) -> Ledger:
    """A ledger with count releases, and its tip, made without charging each."""
    ledger = Ledger(folder)
    folder.mkdir()
    addition, totals = ledger_lines.Addition(Tip(TipPosition(), {})), {}
    with ledger.path.open("wb") as file:
        for number in range(count):
            totals = add_release(totals, update())
            addition.line(update(f"run-{number}").to_json(), totals)
            file.write(addition.data)
            addition.data = b""
    addition.tip.write(ledger.beside, durable=True)
    return ledger


def test_an_edit_far_back_is_found_within_as_many_charges_as_the_ledger_has_pieces(tmp_path: Path) -> None:
    ledger = long_ledger(tmp_path / "state", 8_000)
    data = bytearray(ledger.path.read_bytes())
    place = data.index(b"run-6000")
    data[place : place + 8] = b"run-9999"
    ledger.path.write_bytes(data)
    pieces = len(data) // ledger_lines.CHECKED_EACH_TIME + 2
    with pytest.raises(StateError, match="line 6002 does not follow"):
        for _ in range(pieces):
            ledger.charge(update())


def test_older_lines_without_any_newline_are_named(tmp_path: Path) -> None:
    ledger = long_ledger(tmp_path / "state", 8_000)
    data = ledger.path.read_bytes()
    older = ledger_lines.CHECKED_EACH_TIME + 1000
    ledger.path.write_bytes(data[:older].replace(b"\n", b" ") + data[older:])
    with pytest.raises(StateError, match="line 1 does not follow"):
        ledger.charge(update())


def test_a_server_cannot_fill_the_tip_with_guarantees(tmp_path: Path) -> None:
    ledger = long_ledger(tmp_path / "state", 1)
    tip = Tip.read(ledger.beside)
    assert tip is not None
    many = {update(noise=1.0 + number / 1e6): 1 for number in range(MOST_GUARANTEES)}
    totals = {**{entry: 1 for entry in map(_bare, many)}}
    addition = ledger_lines.Addition(Tip(TipPosition(), {}))
    addition.line({"carried": [[e.to_json(), 1] for e in totals], "time": ""}, totals)
    ledger.path.write_bytes(addition.data)
    addition.tip.write(ledger.beside, durable=True)
    ledger.charge(update(noise=1.0))
    with pytest.raises(PrivacyError, match="yet another guarantee"):
        ledger.charge(update(noise=0.5))


def _bare(entry: Entry) -> Entry:
    from perennial.privacy.ledger_tip import extract_guarantee

    return extract_guarantee(entry)
