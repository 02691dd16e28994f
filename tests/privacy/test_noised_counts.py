"""Federated evaluation under a protection: noised counts, what they cost, and what a run makes of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perennial.client.policy import check_evaluation
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.secure_words import decode_counts, encode_cells
from perennial.config.site import SitePolicy
from perennial.data.site import SiteData
from perennial.data.splits import KeyedHash, group_by_text
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PolicyRefusal, PrivacyError, ProtocolError
from perennial.privacy.composition import compose
from perennial.privacy.ledger import Ledger
from perennial.privacy.noise import Noise
from perennial.privacy.noised_counts import (
    STEPS,
    CountNoise,
    join_cells,
    round_to_samples,
    round_towards_zero,
)
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.server.preflight import open_channels
from perennial.server.site_counts import SiteCounts
from perennial.strategies.round.exchange import check_counts
from tests.redteam.attacked_hospital import BASE, Hospital, template_policy
from tests.redteam.hostile_server import SAMPLE, counted_pixels
from tests.seeded_noise import SeededNoise

NOISED = {"federated": True, "noise_multiplier": 4.0}
HEAD = {"name": "analytic", "head": "ridge", "shrinkage": 0.1, "standardise": False}
OF_SITES = {**NOISED, "clip_counts": 40.0}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 4.0}
SHARED = {"mode": "client_shared", "clip_norm": 1.0, "noise_multiplier": 2.0, "accountant": "rdp"}
SMALL: dict[str, Any] = {
    "name": "counted",
    "seed": 3,
    "data": {
        "source": "digits",
        "sites": 4,
        "samples_limit": 0.4,
        "partition": {"kind": "iid"},
        "validation_fraction": 0.3,
    },
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.3}, "batch_size": 16},
}


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return run_in_process(RunSettings(str(path), runs=str(folder / "runs"), name="run"))


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


COUNTS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40)


@given(COUNTS, st.floats(1.0, 500.0))
def test_what_a_whole_site_tells_never_passes_the_norm(counts: list[int], norm: float) -> None:
    cells = np.array(counts[: len(counts) // 2 * 2], dtype=np.int64)
    shrunk = CountNoise(1.0, norm).shrink(cells)
    assert sum(int(cell) ** 2 for cell in shrunk) <= (norm * STEPS) ** 2
    assert CountNoise(1.0, norm).within(*round_towards_zero(shrunk))
    if np.linalg.norm(cells) <= norm:
        assert (shrunk == cells * STEPS).all()


def test_one_sample_moves_one_cell_by_one() -> None:
    before, right, wrong = join_cells([3, 5], [4, 9]), join_cells([4, 5], [5, 9]), join_cells([3, 5], [4, 10])
    assert before.tolist() == [3, 5, 1, 4]
    assert np.abs(right - before).sum() == np.abs(wrong - before).sum() == 1
    assert round_to_samples(before * STEPS) == ([3, 5], [4, 9])


def test_the_noise_is_as_wide_as_it_says_and_the_sum_of_parts_as_well() -> None:
    noise = CountNoise(3.0, 2.0)
    whole = noise.draw(100_000, Noise()) / STEPS
    assert whole.std() == pytest.approx(6.0, rel=0.02) and abs(whole.mean()) < 0.12
    parts = np.sum([noise.share(50_000, 25, Noise()) for _ in range(25)], axis=0) / STEPS
    assert parts.std() == pytest.approx(6.0, rel=0.03)
    with pytest.raises(PrivacyError, match="too little for the grid"):
        CountNoise(0.01).share(5, 10_000, Noise())


def test_an_interval_covers_the_accuracy_as_often_as_it_says() -> None:
    """Sites of 10 classes count answers of a model that is right in 6 of 10, under noise of their own."""
    random, trials, covered = np.random.default_rng(6), 400, 0
    noise = CountNoise(4.0).draw(trials * 4 * 20, SeededNoise(6)).reshape(trials, 4, 20)
    for of_trial in noise:
        by_site = {}
        for site, drawn in enumerate(of_trial):
            cells = join_cells(random.binomial(30, 0.6, 10).tolist(), [30] * 10) * STEPS
            by_site[str(site)] = round_to_samples(cells + drawn)
        ends = SiteCounts(by_site, std=4.0).interval(10)
        assert ends is not None
        covered += ends[0] <= 0.6 <= ends[1]
    # 95 %, and 4 deviations of so many trials on either side
    assert covered / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / trials))


def load(privacy: Mapping[str, Any], **changes: Any) -> Experiment:
    evaluation = {"evaluation": {"federated": False}}
    return Experiment.model_validate(BASE | {"privacy": dict(privacy)} | evaluation | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"privacy": {"mode": "none"}, "evaluation": NOISED}, "privacy.mode 'none', which claims nothing"),
        ({"privacy": SAMPLE, "evaluation": {"federated": True}}, "no accountant covers"),
        ({"privacy": SAMPLE, "evaluation": NOISED | {"federated": False}}, "no counts leave"),
        ({"privacy": SAMPLE, "evaluation": OF_SITES}, "evaluation.clip_counts: found 40"),
        ({"privacy": LOCAL, "evaluation": NOISED}, "evaluation.clip_counts: found None"),
        ({"privacy": SAMPLE, "evaluation": NOISED | {"noise_multiplier": 1e5}}, "allowed .* to 16384"),
        ({"evaluation": {"clip_counts": 4}}, "clip_counts: found without"),
        (
            {
                "privacy": SAMPLE,
                "evaluation": NOISED,
                "learner": BASE["learner"]
                | {"memory": {"selection": "random", "share": 0.5}, "classifier": "nearest_mean"},
            },
            "one exemplar changes the answer on every held-out sample",
        ),
    ],
)
def test_noise_that_would_hide_nothing_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Experiment.model_validate(BASE | changes)


# one site, over the messages


def ask(hospital: Hospital, model: int = 0) -> EvaluateReply | None:
    """The answer about one of several models that are right on the same samples."""
    arrays = hospital.arrays()
    arrays["head.bias"] += 1e-3 * model
    reply = hospital.ask(EvaluateRequest(**hospital.stamp(2), arrays=Tensors(arrays)))
    assert reply is None or isinstance(reply, EvaluateReply)
    return reply


def test_a_cautious_hospital_answers_noised_counts_and_charges_them_first(tmp_path: Path) -> None:
    policy = {"answers": ["train", "evaluate"], "require_privacy": "sample", "max_epsilon": 8}
    hospital = Hospital(tmp_path, policy, privacy=SAMPLE, evaluation=NOISED)
    first, again, second = ask(hospital), ask(hospital), ask(hospital, model=1)
    assert first is not None and again is not None and second is not None
    assert (first.correct, first.total) == (again.correct, again.total), "one question, one answer"
    assert (first.correct, first.total) != (second.correct, second.total), "fresh noise for another question"
    entries = Ledger(tmp_path / "state").read_entries()
    found = {(e.kind, e.unit, e.mechanism, e.noise_multiplier, e.relation) for e in entries}
    assert found == {("evaluation", "sample", "gaussian", 4.0, "add_remove")} and len(entries) == 2
    # the same hospital refuses exact ones
    exact = Hospital(tmp_path / "exact", policy)
    assert ask(exact) is None and "policy.require_privacy" in exact.refusal


def test_the_budget_ends_the_questions_and_names_its_key(tmp_path: Path) -> None:
    policy = {"answers": ["evaluate"], "require_privacy": "sample", "max_epsilon": 1.5}
    hospital = Hospital(tmp_path, policy, privacy=SAMPLE, evaluation=NOISED)
    answered = 0
    while ask(hospital, model=answered) is not None:
        answered += 1
    assert answered == 2
    assert "policy.max_epsilon" in hospital.refusal and "lifetime epsilon" in hospital.refusal
    assert len(Ledger(tmp_path / "state").read_entries()) == answered


def test_an_image_pixel_by_pixel_fails_under_noise_at_the_budget(tmp_path: Path) -> None:
    """The attack that recovers an image from exact counts, at the shipped policy with evaluation answered."""
    policy = template_policy() | {"answers": ["train", "evaluate"], "min_samples": 1, "max_repeats": 10**6}
    held_out = {"data": BASE["data"] | {"test_fraction": 0.02}}
    hospital = Hospital(tmp_path, policy, privacy=SAMPLE, evaluation=NOISED, **held_out)
    for attempt in range(40):  # the first answer must show a class that seems to have one sample
        outcome = counted_pixels(hospital, attempt)
        assert outcome.recovered == 0
        if "policy." in hospital.refusal:
            break
    assert "policy.max_e" in hospital.refusal


def test_the_floor_is_asked_of_noised_counts(tmp_path: Path) -> None:
    """Which exact count is below the floor must not show: a class near it comes and goes."""
    policy = {"answers": ["evaluate"], "min_samples": 6, "max_repeats": 60}
    hospital = Hospital(tmp_path, policy, privacy=SAMPLE, evaluation=NOISED | {"noise_multiplier": 2.0})
    told: dict[int, int] = {}
    answers = 0
    for model in range(40):
        hospital.refusal = ""
        reply = ask(hospital, model)
        if reply is None:
            assert "policy.min_samples" in hospital.refusal
            continue
        answers += 1
        for label, samples in enumerate(reply.total):
            if label in (reply.withheld or ()):
                assert (samples, reply.correct[label]) == (0, 0)
            else:
                assert samples >= 6
                told[label] = told.get(label, 0) + 1
    assert answers and any(0 < times < answers for times in told.values())


def test_what_the_server_promises_is_no_noise_of_the_sites_own() -> None:
    central = {"mode": "client_central", "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = SitePolicy(require_privacy="client_central", max_epsilon=8)
    check_evaluation(policy, load(central, evaluation=OF_SITES))
    with pytest.raises(PolicyRefusal, match="demands 'sample'"):
        check_evaluation(
            SitePolicy(require_privacy="sample", max_epsilon=8), load(central, evaluation=OF_SITES)
        )


# patients


def test_a_patient_counts_once_whatever_others_have() -> None:
    owners = np.repeat(np.arange(30), 1 + np.arange(30) % 4)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (len(owners), 3), dtype=np.uint8))
    keyed = KeyedHash(b"k" * 32, group_by_text("patient", [str(owner) for owner in owners]))
    empty = torch.empty(0, dtype=torch.int64)
    data = SiteData(
        "a", x, torch.zeros(len(owners), dtype=torch.int64), empty, empty, empty, x[0], x[0], keyed
    )
    rows = torch.arange(len(owners))
    chosen = data.choose_one_per_patient(rows)
    assert sorted(owners[chosen.numpy()].tolist()) == list(range(30))
    assert len(data.choose_one_per_patient(rows[:0])) == 0
    # without one of them, and in another order of the same rows, the others' choices stay
    without = data.choose_one_per_patient(rows[owners != 7].flip(0))
    assert set(chosen.tolist()) - set(without.tolist()) == {i for i in chosen.tolist() if owners[i] == 7}
    assert set(without.tolist()) < set(chosen.tolist())


def test_a_run_that_hides_patients_counts_patients(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    owners = np.repeat(np.arange(150), 3)
    np.savez(
        tmp_path / "p.npz",
        x=rng.integers(0, 256, (450, 4, 4), dtype=np.uint8),
        y=(owners + rng.integers(0, 2, 450)) % 2,
        whose=owners,
    )
    data = {"source": "npz", "path": str(tmp_path / "p.npz"), "patient": "whose", "sites": 1}
    data |= {"validation_fraction": 0.5, "normalise": {"mean": 0.5, "std": 0.3}, "test_fraction": 0.1}
    privacy = SAMPLE | {"unit": "patient"}
    summary = run(tmp_path, data=data, privacy=privacy, evaluation=NOISED | {"noise_multiplier": 0.5})
    (task,) = [event for event in events(tmp_path) if event["event"] == "task_finished"]
    assert task["federated_noise"] == 0.5 and summary["epsilon"]["unit"] == "patient"
    low, high = summary["federated_interval"][0]
    # about 67 patients, not 202 samples: the interval is that of patients
    assert high - low > 2 * 1.96 * math.sqrt(0.25 / 110)


# whole runs


def test_a_run_in_mode_sample_is_measured_charged_and_labelled(tmp_path: Path) -> None:
    private = SAMPLE | {"noise_multiplier": 1.0}
    (tmp_path / "exact").mkdir()
    exact = run(tmp_path / "exact")
    summary = run(tmp_path, privacy=private, evaluation=NOISED)
    assert summary["federated_noise"] == [4.0] and exact["federated_noise"] == [None]
    (low, high), (least, most) = summary["federated_interval"][0], exact["federated_interval"][0]
    assert low <= summary["federated_accuracy"][0] <= high
    assert high - low > most - least
    # each site paid for its counts, and the server's upper bound says so
    entries = Ledger(tmp_path / "runs" / "run" / "sites" / "site-0").read_entries()
    assert [entry.kind for entry in entries] == ["update", "update", "evaluation"]
    unmeasured = compose([e for e in entries if e.kind == "update"], 1e-5).epsilon
    claim = summary["epsilon"]["claim"]
    assert "beside updates, with noise of their own: evaluation" in claim["mechanism"]
    assert summary["epsilon"]["value"] == pytest.approx(compose(entries, 1e-5).epsilon)
    assert unmeasured < summary["epsilon"]["value"]
    report = (tmp_path / "runs" / "run" / "report.html").read_text()
    assert "at the sites (noised)" in report
    assert "at the sites (noised)" not in (tmp_path / "exact" / "runs" / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("privacy", "more", "std"),
    [
        (LOCAL, {}, 160.0),
        ({"mode": "client_central", "clip_norm": 1.0, "noise_multiplier": 1.0}, {}, 160.0),
        (SHARED, {"secure": {"least": 3, "quorum": 4}}, 160.0),
        (SAMPLE, {"secure": {"least": 3, "quorum": 4}}, 8.0),
    ],
    ids=lambda value: value.get("mode", "") if isinstance(value, dict) else "",
)
def test_every_mode_can_be_measured_at_its_sites(
    privacy: dict[str, Any], more: dict[str, Any], std: float, tmp_path: Path
) -> None:
    evaluation = NOISED if privacy["mode"] == "sample" else OF_SITES
    summary = run(tmp_path, privacy=privacy | {}, evaluation=evaluation, **more)
    assert summary["federated_noise"][0] == pytest.approx(std)
    charged = [e for e in Ledger(tmp_path / "runs" / "run" / "sites" / "site-0").read_entries()]
    (entry,) = [e for e in charged if e.kind == "evaluation"]
    assert entry.unit == ("sample" if privacy["mode"] == "sample" else "site")
    assert entry.trusts_server == (privacy["mode"] == "client_central")
    assert entry.noise_multiplier == pytest.approx({"client_local": 2.0}.get(privacy["mode"], 4.0), rel=1e-3)
    # a site's own accuracy shows only where its own noise is on it
    alone = privacy["mode"] in ("client_local",)
    assert all(("accuracy" in site) == alone for site in summary["sites"].values())


def test_closed_form_sums_are_measured_too_and_the_claim_names_both(tmp_path: Path) -> None:
    privacy = {"mode": "sample", "release": "sums", "noise_multiplier": 2.0}
    model = {"name": "features", "features": [{"name": "random", "width": 16}]}
    path = tmp_path / "experiment.yaml"
    changes = {"privacy": privacy, "model": model, "strategy": HEAD}
    content = SMALL | changes | {"evaluation": NOISED, "tasks": {"count": 2, "rounds": 1}}
    del content["learner"]
    path.write_text(yaml.safe_dump(content))
    summary: Any = run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs"), name="run"))
    assert "beside sums, with noise of their own: evaluation" in summary["epsilon"]["claim"]["mechanism"]
    kinds = [e.kind for e in Ledger(tmp_path / "runs" / "run" / "sites" / "site-0").read_entries()]
    assert sorted(kinds) == ["evaluation", "evaluation", "statistics", "statistics"]


def test_a_cap_that_counts_records_stands_in_the_claim_and_a_share_does_not() -> None:
    for limit, named in ((300, True), (0.4, False)):
        capped = load(SAMPLE, data=BASE["data"] | {"samples_limit": limit})
        assert any("data.samples_limit, a number" in channel for channel in open_channels(capped)) == named


def test_words_of_noised_counts_may_be_negative_and_exact_ones_not() -> None:
    cells = np.array([3, -2, 1, 0], dtype=np.int64) * STEPS
    assert decode_counts(encode_cells(cells) + encode_cells(cells), 2, noised=True) == ([6, -4], [8, -4], [])
    with pytest.raises(ValueError, match="no sum of right answers"):
        decode_counts(encode_cells(cells), 2, noised=False)
    with pytest.raises(ValueError, match="words: found 4, expected 6"):
        decode_counts(encode_cells(cells), 3, noised=True)


def test_a_server_that_reads_exact_counts_takes_no_negative_ones(tmp_path: Path) -> None:
    stamp = Hospital(tmp_path, {}).stamp(2)
    negative = EvaluateReply(**stamp, correct=[-1] * stamp["num_classes"], total=[3] * stamp["num_classes"])
    with pytest.raises(ProtocolError, match="fewer than none"):
        check_counts(negative)
    check_counts(negative, CountNoise(1.0))


def test_secure_sums_with_a_trusted_server_are_read_without_a_traceback(tmp_path: Path) -> None:
    """The check of secure and client_central named a key that there is not."""
    path = tmp_path / "e.yaml"
    central = {"mode": "client_central", "clip_norm": 1.0, "noise_multiplier": 1.0}
    bayesian = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0, "bayesian": True}
    content = SMALL | {"secure": {"least": 3}, "evaluation": {"federated": False}}
    path.write_text(yaml.safe_dump(content | {"privacy": central}))
    load_experiment(path)
    path.write_text(yaml.safe_dump(content | {"privacy": bayesian}))
    with pytest.raises(ConfigError, match="bayesian, which reads single replies"):
        load_experiment(path)
