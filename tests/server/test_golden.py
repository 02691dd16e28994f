"""What each release left on disks is opened by this one, and its messages keep their fields."""

import json
import re
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, StateError
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.record_book import RecordBook, as_ids, count_times
from perennial.server.releases import Releases
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


def as_stored(run: Path, name: str, folder: Path) -> Path:
    """The experiment that a run's folder has, every key written out, with the data's path on this machine."""
    own = yaml.safe_load(write_experiment(name, folder).read_text())
    content = yaml.safe_load((run / "experiment.yaml").read_text())
    content["data"]["path"] = own["data"]["path"]
    path = folder / "stored.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def with_secure_noise(run: Path) -> None:
    """Turn a run whose noise repeats into the usual one, at the same length so that its checkpoint loads."""
    for path in (run / "experiment.yaml", *(run / "checkpoint").glob("*.safetensors")):
        path.write_bytes(re.sub(rb"(noise_source\W+)seeded", rb"\1secure", path.read_bytes()))


def resume(path: Path, runs: Path) -> dict[str, Any]:
    return run_in_process(RunSettings(str(path), name="run", runs=str(runs), resume="yes"))


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", [name for name, (*_, stopped) in STATES.items() if stopped])
def test_a_run_that_an_earlier_release_began_is_finished_by_this_one(
    release: Path, name: str, tmp_path: Path
) -> None:
    run = unpacked(release, name, tmp_path / "run")
    with_secure_noise(run)
    before = [event for event in read_events(run) if event["event"] == "round"]
    result = resume(as_stored(run, name, tmp_path), tmp_path)
    assert result["rounds"] == 4
    after = [event for event in read_events(run) if event["event"] == "round"]
    # the third round was not in a checkpoint yet, and is asked again
    assert after[:2] == before[:2] and [event["round"] for event in after] == [1, 2, 3, 4]
    if name == "protected":
        assert read_summary(run).epsilon is not None
        counted = Releases(run).list_charged()
        for site in (run / "sites").iterdir():
            charges = [entry.kind for entry in Ledger(site).read_entries()]
            # this release asks another question in the third round: it is answered, and paid for, anew
            assert charges.count("update") == 5
            assert Counter(charges) == Counter(entry.kind for entry in counted[site.name])


def test_a_run_that_this_release_would_go_on_with_otherwise_is_refused_by_the_key(tmp_path: Path) -> None:
    run = unpacked(GOLDEN / "0.2.0", "replay", tmp_path / "run")
    with pytest.raises(StateError, match=r"began with, in: bounds\.norm_multiple \(was 3\.0, is null\); "):
        resume(write_experiment("replay", tmp_path), tmp_path)
    run = unpacked(GOLDEN / "0.2.0", "protected", tmp_path / "again" / "run")
    path = write_experiment("protected", tmp_path / "again")
    with pytest.raises(StateError, match=r"privacy\.noise_source: found 'seeded', allowed 'secure' alone"):
        resume(path, run.parent)


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
def test_records_that_an_earlier_release_charged_are_known(release: Path, tmp_path: Path) -> None:
    ledger, book = Ledger(unpacked(release, "site", tmp_path)), RecordBook(tmp_path, bytes(32))
    assert len(ledger.read_entries()) == 2
    ledger.require_within(ledger.read_entries()[0], Limit(**BUDGET))
    ids = as_ids(np.arange(3 * 16, dtype=np.uint8).reshape(3, 16))
    found = book.read_other_parts(replace(ledger.read_entries()[0], part="run/task 3"), ledger.totals())
    assert {part: [count_times(each, ids).tolist() for each in sets] for part, sets in found.items()} == {
        "run/task 1": [[1, 1, 1]],
        "run/task 2": [[0, 1, 1]],
    }


def test_messages_keep_their_fields_until_the_protocol_gets_another_version() -> None:
    """A change of a message's fields needs a new VERSION in protocol/stamp.py, by which both sides refuse."""
    kept = [json.loads((release / "messages.json").read_text()) for release in RELEASES]
    same = [one for one in kept if one["version"] == messages()["version"]]
    assert all(one == messages() for one in same) and (same or messages()["version"] > kept[-1]["version"])
