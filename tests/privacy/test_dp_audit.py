"""One run audits the whole way of a record: no floor is above its claim, and the split of old is caught."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perennial.config.experiment import Experiment
from perennial.data import federation
from perennial.engine.dp_audit import audit_experiment
from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.privacy.attacks.one_run import chance, one_run_audit

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def experiment(seed: int = 3, **privacy: Any) -> Experiment:
    samples = privacy["mode"] == "sample"
    # the same noise each time, so that the test says the same each time
    seeded = {"noise_source": "seeded"} if privacy["mode"] != "none" else {}
    memory = {"memory": {"selection": "random", "share": 0.5}} if samples else {}
    return Experiment.model_validate(
        {
            "name": "audited",
            "seed": seed,
            "data": {
                "source": "csv",
                "path": "unused.csv",
                "sites": 2,
                "patient": "mrn",
                "test_fraction": 0.3,
            },
            "tasks": {"count": 2, "rounds": 2},
            "model": {"name": "mlp"},
            "learner": {"preset": "none", "epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}, **memory},
            "privacy": {"clip_norm": 1.0, "delta": 1e-5, **seeded, **privacy},
            "evaluation": {"federated": False},
        }
    )


def hold_out_by_permutation(builder: Any) -> tuple[np.ndarray, np.ndarray]:
    """The split as it was: each class permuted by a stream whose result depends on how many there are."""
    train, test = [], []
    for label in np.unique(builder.labels):
        rows = np.flatnonzero(builder.labels == label)
        shuffled = stream(builder.seed, "test-split", builder.registry.classes[label]).permutation(rows)
        count = min(len(rows) - 1, int(builder.config.test_fraction * len(rows) + 0.5))
        test.append(shuffled[:count])
        train.append(shuffled[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


WEAK = {"mode": "sample", "noise_multiplier": 20.0, "sample_rate": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [
        {"mode": "sample", "noise_multiplier": 1.0, "sample_rate": 1.0},
        {"mode": "sample", "unit": "patient", "noise_multiplier": 1.0, "sample_rate": 1.0},
        {"mode": "client_local", "noise_multiplier": 2.0},
        {"mode": "client_central", "noise_multiplier": 1.0},
        WEAK,
    ],
)
def test_no_floor_is_above_the_claim(privacy: dict[str, Any]) -> None:
    found = audit_experiment(experiment(**privacy), canaries=80, others=6)
    assert found.unit == {"sample": privacy.get("unit", "sample")}.get(privacy["mode"], "site")
    assert math.isfinite(found.claim) and found.contradictions == []
    assert found.watched > 0 and found.found.refutable >= found.found.epsilon_floor
    assert found.found.guesses >= 10
    if privacy["noise_multiplier"] <= 2:
        assert found.found.right > found.found.guesses / 2, "the audit sees something"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sample", "sample_shared"])
def test_no_floor_of_noised_sums_is_above_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path))
    content = experiment(mode="client_local", noise_multiplier=1.0).model_dump(
        mode="json", exclude_unset=True, exclude={"learner"}
    )
    content |= {
        "model": {"name": "features", "features": [{"name": "random", "width": 8}]},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 1.0, "standardise": False},
        "secure": {"least": 2, "quorum": 2} if mode == "sample_shared" else None,
        "privacy": {"mode": mode, "release": "sums", "noise_multiplier": 1.0, "noise_source": "seeded"}
        | ({"accountant": "rdp"} if mode == "sample_shared" else {}),
    }
    found = audit_experiment(Experiment.model_validate(content), canaries=1000)
    assert found.unit == "sample" and found.mode == mode
    assert 0.3 < found.found.epsilon_floor < found.claim < math.inf


@pytest.mark.slow
def test_the_split_of_old_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation._Builder, "_train_and_test", hold_out_by_permutation)
    found = audit_experiment(experiment(**WEAK), canaries=80, others=200)
    assert any("canaries" in words for words in found.contradictions), "one record moves others"
    assert found.found.epsilon_floor > found.claim > 0


@pytest.mark.slow
def test_a_mechanism_without_noise_is_caught() -> None:
    found = audit_experiment(experiment(mode="client_local", noise_multiplier=0.0), canaries=40)
    assert found.claim == math.inf and found.found.epsilon_floor > 1.5
    assert found.found.right == found.found.guesses


def test_the_page_says_what_the_recorded_audits_found() -> None:
    recorded = [json.loads(line) for line in (RESULTS / "dp_audit.jsonl").read_text().splitlines()]
    page = (RESULTS.parents[1] / "docs" / "privacy.md").read_text()
    for row in recorded:
        assert row["epsilon_floor"] <= row["claim"]
        figures = f"{row['claim']:.1f} | {row['epsilon_floor']:.1f} | {row['right']} of {row['guesses']} |"
        assert f"| `{row['experiment']}` | {row['mode']} | {row['unit']} | {figures}" in page
    found = {(row["mode"], row["unit"]) for row in recorded}
    assert found >= {("sample", "sample"), ("sample", "patient"), ("client_local", "site")}
    assert found >= {("client_central", "site")}


def test_nothing_claimed_is_not_audited() -> None:
    with pytest.raises(PrivacyError, match="claims nothing"):
        audit_experiment(experiment(mode="none", clip_norm=None))


def test_the_bound_by_hand() -> None:
    # all of 10 guesses right under a fair coin: 2^-10; under e^eps = 3: (3/4)^10
    assert chance(10, 10, 10, 0.0, 0.0) == pytest.approx(2**-10)
    assert chance(10, 10, 10, math.log(3), 0.0) == pytest.approx(0.75**10)
    assert chance(10, 10, 0, 1.0, 0.0) == 1.0
    # delta adds at most 2 m delta times the largest mean probability of falling short by up to i
    below = [10 * 0.75**9 * 0.25, 45 * 0.75**8 * 0.25**2]
    most = max(below[0], sum(below) / 2)
    assert chance(10, 10, 10, math.log(3), 1e-3) >= 0.75**10 + 2 * 10 * 1e-3 * most * (1 - 1e-9)
    scores, present = np.arange(40.0), np.arange(40) >= 20
    found = one_run_audit(scores, present, 0.0, share=1.0)
    assert (found.right, found.guesses) == (40, 40)
    assert chance(40, 40, 40, found.epsilon_floor, 0.0) == pytest.approx(0.05, rel=1e-3)


def test_guesses_by_chance_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    floors = [
        one_run_audit(rng.normal(size=200), rng.random(200) < 0.5, 1e-5).epsilon_floor for _ in range(200)
    ]
    assert np.mean(np.array(floors) > 0) <= 0.1
    with pytest.raises(ValueError, match="at least 10"):
        one_run_audit(np.zeros(9), np.zeros(9, dtype=bool), 1e-5)


def test_randomised_response_is_not_audited_above_its_epsilon() -> None:
    rng = np.random.default_rng(1)
    floors = []
    for _ in range(100):
        present = rng.random(400) < 0.5
        told = np.where(rng.random(400) < 1 / (1 + math.exp(-1.0)), present, ~present)
        floors.append(one_run_audit(told + rng.random(400) / 2, present, 0.0).epsilon_floor)
    assert np.mean(np.array(floors) > 1.0) <= 0.1
    assert 0.4 < np.median(floors) < 1.0
