"""The ledger never under-counts: after kill -9, a torn line, an edit, a full disk or two writers at once."""

import json
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perennial.cli.privacy import ledger_command
from perennial.client.activity import note_request
from perennial.foundation.errors import PrivacyError, StateError
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger, Limit
from tests.forks import run_code, started_code
from tests.privacy.budgets import budget_for

LOCAL = PrivacyConfig(mode="client_local", clip_norm=1.0, noise_multiplier=8.0)


def update(run: str = "run-1", privacy: PrivacyConfig = LOCAL) -> Entry:
    return Entry.of_update(privacy, run=run, experiment="e1", recipient="server")


def charged(folder: Path, count: int) -> Ledger:
    ledger = Ledger(folder)
    for index in range(count):
        ledger.charge(update(f"run-{index}"))
    return ledger


def test_no_file_costs_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "absent")
    assert ledger.read_entries() == ()
    assert ledger.cost(1e-5).epsilon == 0.0
    assert not ledger.path.exists()


def test_charges_compose_over_runs_and_restarts(tmp_path: Path) -> None:
    charged(tmp_path, 50)
    again = Ledger(tmp_path)
    assert [entry.run for entry in again.read_entries()] == [f"run-{index}" for index in range(50)]
    cost = again.cost(1e-5)
    assert cost.epsilon == pytest.approx(8.606, rel=0.01)
    assert (cost.unit, cost.relation, cost.releases, cost.trusts_server) == ("site", "replace", 50, False)


def test_the_command_shows_a_run_s_whole_token_on_a_narrow_terminal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    named, other = "0123456789abcdef", "fedcba9876543210"
    with note_request(tmp_path, "train", run=named, name="skin", round=1):
        Ledger(tmp_path).charge(update(named))
    Ledger(tmp_path).charge(update(other))
    ledger_command(tmp_path, 1e-5, None)
    said = capsys.readouterr().out
    assert "skin" in said and named in said and other in said


def test_the_file_is_for_the_site_alone(tmp_path: Path) -> None:
    ledger = charged(tmp_path / "state", 1)
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    ledger.path.chmod(0o644)
    ledger.charge(update())
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600


def test_every_field_comes_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    place: dict[str, Any] = {
        "run": "r",
        "experiment": "e",
        "recipient": "server",
        "unit": "sample",
        "relation": "replace",
    }
    entries = [
        Entry(**place, kind="digest", mechanism="gaussian", noise_multiplier=0.0, sample_rate=1.0, steps=1),
        Entry(**place, kind="labels", mechanism="stated", epsilon=0.0, delta=0.0, note="randomised response"),
        Entry(**place, kind="evaluation", mechanism="unprotected", trusts_server=True),
    ]
    for entry in entries:
        ledger.charge(entry)
    assert [entry.to_json() | {"time": ""} for entry in ledger.read_entries()] == [
        entry.to_json() | {"time": ""} for entry in entries
    ]


def test_unprotected_releases_cost_infinity_and_stay_json_safe(tmp_path: Path) -> None:
    ledger = charged(tmp_path, 2)
    ledger.charge(update(privacy=PrivacyConfig()))
    cost = ledger.cost(1e-5)
    assert (cost.epsilon, cost.unprotected, cost.releases) == (float("inf"), 1, 3)
    assert json.loads(json.dumps(cost.to_json(), allow_nan=False))["epsilon"] == "infinite"
    json.dumps([json.loads(line) for line in ledger.path.read_text().splitlines()], allow_nan=False)


@pytest.mark.parametrize(
    "numbers",
    [
        {"sample_rate": 0.0},
        {"sample_rate": -0.5},
        {"sample_rate": 1.1},
        {"steps": 0},
        {"noise_multiplier": -0.1},
        {"noise_multiplier": float("inf")},
        {"steps": None},
    ],
)
def test_an_entry_has_numbers_that_a_mechanism_can_have(numbers: dict[str, Any]) -> None:
    entry = update()
    assert replace(entry, sample_rate=1.0, steps=1, noise_multiplier=0.0).steps == 1
    with pytest.raises(PrivacyError, match="gaussian"):
        replace(entry, **numbers)


class TestLimit:
    limit = budget_for([update()] * 50, 1e-5)

    def test_the_budget_ends_where_it_was_set(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        for _ in range(50):
            ledger.charge(update(), self.limit)
        size = ledger.path.stat().st_size
        with pytest.raises(PrivacyError, match=r"update for server would bring .* limit is 9\."):
            ledger.charge(update(), self.limit)
        assert ledger.path.stat().st_size == size
        # what it says it has spent is the tighter figure of a history that is over
        assert 0.8 * self.limit.epsilon < ledger.cost(1e-5).epsilon < self.limit.epsilon

    def test_unprotected_never_fits(self, tmp_path: Path) -> None:
        with pytest.raises(PrivacyError, match="inf"):
            Ledger(tmp_path).charge(update(privacy=PrivacyConfig()), self.limit)

    def test_a_site_limit_refuses_what_hides_a_sample_only(self, tmp_path: Path) -> None:
        privacy = PrivacyConfig(mode="sample", sample_rate=0.1, clip_norm=1.0, noise_multiplier=8.0)
        Ledger(tmp_path).charge(update(privacy=privacy), self.limit)
        with pytest.raises(PrivacyError):
            Ledger(tmp_path).charge(update(privacy=privacy), Limit(epsilon=8.7, delta=1e-5, unit="site"))


KILLED = """
import os, signal, sys
from pathlib import Path
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
entry = Entry(run="r", experiment="e", recipient="server", kind="update", unit="site", relation="replace",
              mechanism="gaussian", noise_multiplier=4.0, sample_rate=1.0, steps=1)
ledger = Ledger(Path(sys.argv[1]))
for sent in range(3):
    ledger.charge(entry)
    if sent == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print(sent, flush=True)
"""


def test_kill_between_charge_and_send_leaves_the_charge(tmp_path: Path) -> None:
    run = run_code(KILLED, str(tmp_path))
    assert run.returncode == -signal.SIGKILL
    sent = len(run.stdout.splitlines())
    assert sent == 2
    assert len(Ledger(tmp_path).read_entries()) == 3 >= sent
    charged(tmp_path, 1)
    assert len(Ledger(tmp_path).read_entries()) == 4


REPEATED = """
import sys
from pathlib import Path
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
entry = Entry(run="r", experiment="e", recipient="server", kind="update", unit="site", relation="replace",
              mechanism="gaussian", noise_multiplier=4.0, sample_rate=1.0, steps=1)
ledger = Ledger(Path(sys.argv[1]))
while True:
    ledger.charge(entry)
    print("left", flush=True)
"""


def test_kill_at_any_moment_never_under_counts(tmp_path: Path) -> None:
    left = 0
    for kills, read in enumerate((3, 8), start=1):
        with started_code(REPEATED, str(tmp_path)) as process:
            while len(process.read_lines()) < read:
                time.sleep(0.001)
            process.kill()
            left += len(process.read_lines())
        # each kill may fall between a charge and the line that says that it left
        assert left <= len(Ledger(tmp_path).read_entries()) <= left + kills


@pytest.mark.parametrize("kept", [1, 40, 200])
def test_a_torn_line_is_repaired_with_a_note(tmp_path: Path, kept: int) -> None:
    ledger = charged(tmp_path, 2)
    whole, tip = ledger.path.read_bytes(), ledger.beside.read_bytes()
    charged(tmp_path, 1)
    ledger.path.write_bytes(ledger.path.read_bytes()[: len(whole) + kept])
    ledger.beside.write_bytes(tip)  # a crash in the middle of a line comes before the tip
    assert len(ledger.read_entries()) == 2
    ledger.charge(update("after"))
    assert [entry.run for entry in ledger.read_entries()] == ["run-0", "run-1", "after"]
    notes = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert len([note for note in notes if "repair" in note]) == 1
    assert ledger.path.read_bytes().startswith(whole)


@pytest.mark.parametrize("line", [0, 1, 2])
def test_an_edited_line_is_noticed(tmp_path: Path, line: int) -> None:
    ledger = charged(tmp_path, 4)
    lines = ledger.path.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace('"noise_multiplier":4.0', '"noise_multiplier":9.0')
    ledger.path.write_text("".join(lines))
    for use in (ledger.read_entries, lambda: ledger.charge(update()), lambda: ledger.cost(1e-5)):
        with pytest.raises(StateError, match=f"line {line + 2} does not follow"):
            use()


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_removed_line_is_noticed(tmp_path: Path, line: int) -> None:
    ledger = charged(tmp_path, 4)
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(StateError, match="lacks line 4"):
        ledger.charge(update())
    ledger.beside.unlink()
    with pytest.raises(StateError, match="changed or removed"):
        ledger.charge(update())


@pytest.mark.parametrize(
    "damage",
    ["not json\n", '{"previous":"x"}\n', "\n", '["list"]\n', "[" * 100_000 + "\n"],
    ids=["text", "unchained", "empty", "list", "deep"],
)
def test_a_damaged_whole_line_is_no_torn_one(tmp_path: Path, damage: str) -> None:
    ledger = charged(tmp_path, 1)
    with ledger.path.open("a") as file:
        file.write(damage)
    with pytest.raises(StateError, match="line 2"):
        ledger.charge(update())


FULL = """
import resource, sys
from pathlib import Path
from perennial.foundation.errors import StateError
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
entry = Entry(run="r", experiment="e", recipient="server", kind="update", unit="site", relation="replace",
              mechanism="gaussian", noise_multiplier=4.0, sample_rate=1.0, steps=1)
ledger = Ledger(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    while True:
        ledger.charge(entry)
        print("left", flush=True)
except StateError as error:
    print(error)
"""


def test_full_disk_stops_the_release(tmp_path: Path) -> None:
    run = run_code(FULL, str(tmp_path))
    assert run.returncode == 0, run.stderr
    *left, message = run.stdout.splitlines()
    assert "must not leave" in message
    assert len(left) >= 1
    ledger = Ledger(tmp_path)
    assert len(ledger.read_entries()) == len(left)
    ledger.charge(update())
    assert len(ledger.read_entries()) == len(left) + 1


def test_a_folder_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(StateError, match="nothing may leave"):
        Ledger(tmp_path / "state").charge(update())


def test_a_link_in_place_of_the_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError):
        Ledger(tmp_path).charge(update())


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    threads = [Thread(target=charged, args=(tmp_path, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Ledger(tmp_path).read_entries()) == 40


def test_two_writers_cannot_both_take_what_is_left_for_one(tmp_path: Path) -> None:
    limit = budget_for([update()], 1e-5)
    refused: list[PrivacyError] = []

    def take() -> None:
        try:
            Ledger(tmp_path).charge(update(), limit)
        except PrivacyError as error:
            refused.append(error)

    threads = [Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(refused), len(Ledger(tmp_path).read_entries())) == (3, 1)


def test_a_held_ledger_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("perennial.privacy.ledger._LOCK_SECONDS", 0.1)
    ledger = charged(tmp_path, 1)
    descriptor = os.open(ledger.path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(StateError, match="held by another process"):
            ledger.charge(update())
    finally:
        os.close(descriptor)
    ledger.charge(update())
