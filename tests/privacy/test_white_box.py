"""The white-box audit notices what it must, in the code and in recordings, and leaves honest runs alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.audit_power import HONEST, RESULTS, RUNS, WRONG, WRONGS, page
from perennial.engine.dp_audit import audit_experiment
from perennial.foundation.errors import PrivacyError
from perennial.privacy import sample_level
from perennial.privacy.attacks.gaussian_estimate import estimate_mu, mu_of
from perennial.privacy.attacks.white_box import Recording, findings
from perennial.privacy.ledger import Ledger
from perennial.privacy.sample_level import PrivateGradient
from tests.privacy.test_dp_audit import experiment

DRAW = np.random.default_rng(11)
HONEST_RUN = Recording(
    noise=[DRAW.normal(0, 2.0, 500) for _ in range(12)],
    std=2.0,
    shares=[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    honest=3,
    largest=(0.4, 1.0),
    clip_norm=1.0,
    drawn=[(10, 100)] * 20,
    sample_rate=0.1,
    made={"step": 12},
    charged={"step": 12},
    parts=[("run", "task 1", frozenset({1, 2})), ("run", "task 2", frozenset({3}))],
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"noise": [0.9 * one for one in HONEST_RUN.noise]}, "of the claimed standard deviation"),
        ({"noise": [one + 0.3 for one in HONEST_RUN.noise]}, "its mean"),
        ({"noise": [HONEST_RUN.noise[0]] * 12}, "correlated"),
        ({"noise": [1.3 * one for one in HONEST_RUN.noise]}, "which is more"),
        ({"shares": [[0, 1], [3, 4], [6, 7], [9, 10]]}, "masked sums"),
        ({"largest": (0.4, 1.2)}, "clip: one contribution has length 1.2"),
        ({"drawn": [(20, 100)] * 20}, "sampling: batches hold 0.2"),
        ({"charged": {"step": 11}}, "12 of step were made, 11 are charged"),
        ({"parts": [*HONEST_RUN.parts, ("run", "task 3", frozenset({2, 9}))]}, "shares 1 records"),
        ({"parts": [*HONEST_RUN.parts, ("other run", "task 3", frozenset({2, 9}))]}, ""),
    ],
)
def test_each_claim_has_a_test_that_can_fail(changes: dict[str, Any], words: str) -> None:
    found = findings(replace(HONEST_RUN, **changes))
    assert words in "; ".join(found) if words else found == []


def test_the_committed_power_is_what_the_page_promises() -> None:
    content = json.loads(RESULTS.with_suffix(".json").read_text())
    assert RESULTS.with_suffix(".md").read_text() == page(content), "run benchmarks.audit_power"
    rows = {(row["run"], row["replay"]): row for row in content["rows"]}
    expected = {(run, name) for name, (_, runs) in WRONGS.items() for run in runs}
    assert set(rows) == expected | {(run, "honest") for run in RUNS}
    for (_, name), row in rows.items():
        if name == "honest":
            assert row["of"] == HONEST and 200 * row["found"] <= row["of"]
        else:
            assert row["of"] == WRONG and row["found"] >= 0.95 * row["of"]


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 9.0])
def test_mu_of_a_claim_is_that_of_a_gaussian_mechanism(epsilon: float) -> None:
    from scipy.stats import norm

    mu = mu_of(epsilon, 1e-5)
    excess = norm.cdf(-epsilon / mu + mu / 2) - np.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
    assert excess == pytest.approx(1e-5, rel=1e-3)


def test_the_estimate_of_mu_covers_the_truth_and_contradicts_a_false_claim() -> None:
    draw, covered = np.random.default_rng(2), 0
    present = np.ones(200, dtype=bool)
    for _ in range(200):
        present = draw.random(200) < 0.5
        found = estimate_mu(draw.normal(1.5 * present, 1.0), present, np.inf, 1e-5)
        covered += found.low <= 1.5 <= found.high
    assert 180 <= covered <= 198
    assert estimate_mu(draw.normal(3.0 * present, 1.0), present, 0.5, 1e-5).contradicts


SMALL = {"mode": "sample", "noise_multiplier": 2.0, "sample_rate": 0.5}


@pytest.mark.slow
def test_a_run_as_it_should_be_is_left_alone() -> None:
    found = audit_experiment(experiment(**SMALL), canaries=20, others=4)
    assert found.contradictions == [] and found.watched > 0


@pytest.mark.slow
def test_too_little_noise_in_the_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = sample_level.add_noise
    monkeypatch.setattr(sample_level, "add_noise", lambda vector, std, source: add(vector, 0.9 * std, source))
    found = audit_experiment(experiment(**SMALL), canaries=20, others=4)
    assert any("of the claimed standard deviation" in words for words in found.contradictions)


@pytest.mark.slow
def test_too_long_a_clip_in_the_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = PrivateGradient.__enter__

    def longer(self: PrivateGradient) -> PrivateGradient:
        self._clip_norm *= 1.2
        self._noise_multiplier /= 1.2
        return enter(self)

    monkeypatch.setattr(PrivateGradient, "__enter__", longer)
    found = audit_experiment(experiment(**SMALL), canaries=20, others=4)
    assert any("clip: one contribution" in words for words in found.contradictions)


@pytest.mark.slow
def test_a_release_that_no_ledger_has_ends_the_command_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import yaml

    from perennial.cli.privacy import audit_command

    charge, calls = Ledger.charge, []

    def forgetful(self: Ledger, *arguments: Any) -> None:
        calls.append(None)
        if len(calls) % 3:
            charge(self, *arguments)

    monkeypatch.setattr(Ledger, "charge", forgetful)
    path = tmp_path / "experiment.yaml"
    local = experiment(mode="client_local", noise_multiplier=2.0)
    path.write_text(yaml.safe_dump(local.model_dump(mode="json", exclude_unset=True)))
    with pytest.raises(PrivacyError, match=r"ledger: \d+ of update were made"):
        audit_command(path, [], canaries=20, others=2, results=None)
