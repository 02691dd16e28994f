"""Reports of run folders with missing or damaged files: the error names the file and what to do."""

import json
from pathlib import Path

import pytest

from perennial.foundation.errors import StateError
from perennial.server.report.write import write_report
from tests.run_folders import Page, round_event, write_run


def report(folder: Path) -> Page:
    return Page(write_report(folder))


@pytest.mark.parametrize("name", ["summary.json", "events.jsonl", "experiment.yaml"])
def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    experiment = "EXPERIMENT " if name == "experiment.yaml" else ""
    said = rf"{name}: missing.*perennial run {experiment}--resume .*; .*perennial deploy resume run`"
    with pytest.raises(StateError, match=said):
        write_report(folder)


def test_a_folder_without_a_run_is_not_to_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no run is in it; name a folder"):
        write_report(tmp_path)


def test_a_summary_that_is_cut_short_or_lacks_a_key_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(whole[:-20])
    with pytest.raises(StateError, match=r"summary\.json: damaged or cut short"):
        write_report(folder)
    content = json.loads(whole)
    del content["final_accuracy"]
    (folder / "summary.json").write_text(json.dumps(content))
    with pytest.raises(StateError, match=r"summary\.json: .*final_accuracy: Field required"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_torn_last_line_is_tolerated_and_a_damaged_one_before_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(whole + '{"event": "round", "rou')
    assert "All 3 rounds in numbers" in report(folder).text
    for line in ('{"event": "round", "rou', '"round"', "[" * 10**5, "{}", '{"event": 1}'):
        (folder / "events.jsonl").write_text(f"{line}\n{whole}")
        with pytest.raises(StateError, match=r"events\.jsonl.*line 1"):
            write_report(folder)
    (folder / "events.jsonl").write_text(whole + json.dumps(round_event(4, 3, bytes_up="many")) + "\n")
    with pytest.raises(StateError, match=r"events\.jsonl, round 4: .*bytes_up.*'many'"):
        write_report(folder)
