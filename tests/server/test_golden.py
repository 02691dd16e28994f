"""What each release left on disks is opened by this one, and its messages keep their fields."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, StateError
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.record_book import RecordBook, as_ids
from perennial.server.run_record import read_events, read_run, read_summary
from perennial.server.verification import verify
from perennial.server.withdrawal import withdraw
from tests.server.golden_states import BUDGET, STATES, messages, write_experiment

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RELEASES = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
assert RELEASES


def unpacked(release: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(release / f"{name}.zip") as packed:
        packed.extractall(folder)
    return folder


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", [name for name, (*_, stopped) in STATES.items() if stopped])
def test_a_run_that_an_earlier_release_began_is_finished_by_this_one(
    release: Path, name: str, tmp_path: Path
) -> None:
    run = unpacked(release, name, tmp_path / "run")
    path = write_experiment(name, tmp_path)
    before = [event for event in read_events(run) if event["event"] == "round"]
    result = run_in_process(RunSettings(str(path), runs=str(tmp_path), resume="yes"))
    assert result["rounds"] == 4
    after = [event for event in read_events(run) if event["event"] == "round"]
    # the third round was not in a checkpoint yet, and is asked again
    assert after[:2] == before[:2] and [event["round"] for event in after] == [1, 2, 3, 4]
    if name == "protected":
        assert read_summary(run).epsilon is not None
        for site in (run / "sites").iterdir():
            charges = [entry.kind for entry in Ledger(site).entries()]
            assert charges.count("update") == 4, "the reply that was kept is not charged again"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", [name for name, (*_, stopped) in STATES.items() if not stopped])
def test_a_run_that_an_earlier_release_finished_is_read_by_every_command(
    release: Path, name: str, tmp_path: Path
) -> None:
    run = unpacked(release, name, tmp_path / "run")
    assert read_run(run).summary.versions["perennial"] == release.name
    commands = [["report", str(run)]]
    if name == "noised_sums":
        commands.append(["ledger", str(run / "sites" / "graz")])
    for command in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output)


def test_a_model_whose_sums_were_signed_without_settings_is_left_to_its_release(tmp_path: Path) -> None:
    run = unpacked(GOLDEN / "0.2.0", "sums", tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    refused = "the statement of graz on task 1 is of another release .*; use the release that wrote the run"
    for command in (lambda: verify(run), lambda: withdraw(run, "wien")):
        with pytest.raises(ConfigError, match=refused):
            command()
    (certificate,) = run.glob("certificates/*.json")
    with pytest.raises(StateError, match=r"0001-withdraw-linz\.json: no statements of sums of this release"):
        verify(certificate)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_records_go_on_paying_for_what_an_earlier_release_charged(release: Path, tmp_path: Path) -> None:
    ledger, book = Ledger(unpacked(release, "site", tmp_path)), RecordBook(tmp_path, bytes(32))
    assert len(ledger.entries()) == 2
    ids = as_ids(np.arange(3 * 16, dtype=np.uint8).reshape(3, 16))
    paid, _ = book.payments(ledger).of(ids, Limit(**BUDGET), ledger.entries()[0])
    assert 0 < paid[0, 0] < paid[1, 0] == paid[2, 0]


def test_messages_keep_their_fields_until_the_protocol_gets_another_version() -> None:
    """A change of a message's fields needs a new VERSION in protocol/stamp.py, by which both sides refuse."""
    kept = [json.loads((release / "messages.json").read_text()) for release in RELEASES]
    same = [one for one in kept if one["version"] == messages()["version"]]
    assert all(one == messages() for one in same) and (same or messages()["version"] > kept[-1]["version"])
