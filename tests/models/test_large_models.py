"""What a run does to save memory with a large model changes no bit."""

from pathlib import Path

import pytest

from perennial import run
from perennial.models import flat

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("tasks.count=2", "tasks.rounds=2", "learner.epochs=1", "evaluation.every=round")


@pytest.mark.parametrize("experiment", ["replay_digits", "pp_fcil_digits"])
def test_memory_is_given_back_and_the_bits_stay(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "experiments" / f"{experiment}.yaml"
    plain = run(path, name="plain", runs=tmp_path, overrides=SMALL)
    given_back = []
    forget = flat.FlatParameters.forget

    def counted(self: flat.FlatParameters) -> None:
        given_back.append(self)
        forget(self)

    monkeypatch.setattr(flat, "LARGE", 1)
    monkeypatch.setattr(flat.FlatParameters, "forget", counted)
    saving = run(path, name="saving", runs=tmp_path, overrides=SMALL)
    assert given_back
    assert saving.summary["model_sha256"] == plain.summary["model_sha256"]
    assert saving.summary["accuracy_matrix"] == plain.summary["accuracy_matrix"]
