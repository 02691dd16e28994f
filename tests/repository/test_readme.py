"""README.md as one script: every command and snippet of it, in order, twice."""

import json
from pathlib import Path

import pytest

from docs.run_readme import copy_checkout, run, script_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_every_block_of_code_is_run() -> None:
    script = script_of(README)
    assert script.count("\nEND_OF_SNIPPET\n") == README.count("```python\n")
    run_blocks = README.count("```python\n") + README.count("```sh")
    assert run_blocks == README.count("```") // 2 - README.count("```text\n")
    assert "pip install" in script and "pip install" not in script_of(README, installed=True)


def test_the_printed_result_is_that_of_the_run_that_is_pictured() -> None:
    summary = json.loads((ROOT / "docs" / "report_run" / "summary.json").read_text())
    figures = (100 * summary[key] for key in ("final_accuracy", "average_incremental_accuracy", "forgetting"))
    said = "final accuracy {:.1f} %, average incremental accuracy {:.1f} %, forgetting {:.1f} points"
    assert said.format(*figures) in README


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


@pytest.mark.slow
def test_the_whole_readme_runs_twice_in_an_empty_home(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    copy_checkout(checkout)
    for _ in range(2):
        assert run(checkout, installed=True) == 0
