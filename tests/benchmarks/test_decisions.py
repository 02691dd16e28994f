"""What became of undecided claims is read as it was written, and what was taken off goes on counting."""

import json
from math import inf
from pathlib import Path

from benchmarks.decisions import Estimate, read_decisions
from benchmarks.paper_claims import Claim, judge


def test_claims_that_were_taken_off_count_in_the_correction() -> None:
    claim = Claim("c", "a", "b", "m")
    runs = [
        {"row": row, "seed": seed, "measures": {"m": share}}
        for seed, gain in enumerate((0.02, 0.03, 0.01, 0.035, 0.02))
        for row, share in (("a", 0.5 + gain), ("b", 0.5))
    ]
    assert judge([(claim, runs)])[0].word == "holds"
    assert judge([(claim, runs)], tested=100)[0].word == "undecided"


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "power.json").write_text(
        json.dumps(
            [vars(Estimate("t", "c", "undecided", 0.0, 1.0, 5, 7, 1.0)) | {"needed": None, "minutes": -1.0}]
        )
    )
    [found] = read_decisions(tmp_path).values()
    assert found.needed == inf and found.decision == "taken off"
    assert read_decisions(tmp_path / "nowhere") == {}
