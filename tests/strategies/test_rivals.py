"""Federated baselines on quadratics: hand-computed rounds, and what each one reduces to."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.baselines.adabest import AdaBest
from perennial.baselines.feddisco import FedDisco, check_counts, compute_disco_weights, measure_discrepancies
from perennial.client.state import SiteState
from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import ConfigError, StateError
from perennial.learning.batches import TrainingSet, shuffle_batches
from perennial.models.layers import grown
from perennial.privacy.config import PrivacyConfig
from perennial.protocol.stamp import Stamp
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.feddyn import FedDyn
from perennial.strategies.fednova import FedNova, accumulate_weight
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.scaffold import Scaffold
from tests.rounds import begun
from tests.strategies.quadratics import STAMP, Federation

ONE = {"a": 1, "b": 1}
ONE_TWO = {"a": 1, "b": 2}
OPTIMA = {"a": 0.0, "b": 4.0}


def federation(
    strategy: IncrementalStrategy, folder: Path, steps: dict[str, int] = ONE, **more
) -> Federation:
    return Federation(strategy, folder, OPTIMA, steps, **more)


def test_one_round_by_hand(tmp_path: Path) -> None:
    assert federation(FedAvg(), tmp_path).play() == pytest.approx(1.5)
    assert federation(FedAvg(), tmp_path, ONE_TWO).play() == pytest.approx(1.875)
    assert federation(FedNova(), tmp_path, ONE_TWO).play() == pytest.approx(1.46875)


def test_fedprox_pulls_back_to_the_model_received(tmp_path: Path) -> None:
    assert federation(FedAvg(), tmp_path, {"a": 1, "b": 1}, mu=1.0).locals("b") == pytest.approx(2.5)
    assert federation(FedAvg(), tmp_path, {"a": 1, "b": 2}, mu=1.0).locals("b") == pytest.approx(2.5)
    assert federation(FedAvg(), tmp_path, {"a": 1, "b": 2}).locals("b") == pytest.approx(3.25)


def test_scaffold_takes_the_drift_out_of_the_second_round(tmp_path: Path) -> None:
    strategy = Scaffold()
    played = federation(strategy, tmp_path)
    assert played.play() == pytest.approx(1.5)
    assert float(strategy.memory["w"]) == pytest.approx(-1.0)
    assert played.locals("a") == pytest.approx(1.75)
    assert played.locals("b") == pytest.approx(1.75)
    assert played.play() == pytest.approx(1.75)


@settings(deadline=None, max_examples=25)
@given(
    optima=st.lists(st.floats(-3, 3), min_size=2, max_size=4), steps=st.lists(st.integers(1, 4), min_size=4)
)
def test_scaffolds_variate_is_the_mean_of_the_sites(
    tmp_path_factory: pytest.TempPathFactory, optima: list[float], steps: list[int]
) -> None:
    names = "abcd"[: len(optima)]
    strategy = Scaffold()
    folder = tmp_path_factory.mktemp("scaffold")
    played = Federation(
        strategy, folder, dict(zip(names, optima, strict=True)), dict(zip(names, steps, strict=False)), lr=0.1
    )
    for _ in range(3):
        played.play()
    kept = []
    for name in names:
        record = SiteState(folder / name, name).get("correction", before=99)
        assert record is not None
        kept.append(float(record[0]["w"]))
    assert float(strategy.memory["w"]) == pytest.approx(np.mean(kept), abs=1e-4)


def test_feddyn_finds_the_optimum_of_the_federation_in_one_exact_round(tmp_path: Path) -> None:
    strategy = FedDyn(alpha=1.0)
    played = federation(strategy, tmp_path)  # curvature 2 and steps of 0.5: one step is the exact minimiser
    assert played.locals("a") == pytest.approx(0.5)
    assert played.locals("b") == pytest.approx(2.5)
    assert played.play() == pytest.approx(2.0)
    assert float(strategy.memory["w"]) == pytest.approx(-0.5)


def test_adabest_goes_on_in_the_direction_of_the_mean(tmp_path: Path) -> None:
    assert federation(AdaBest(mu=0.1, beta=0.5), tmp_path).play() == pytest.approx(1.75)


def test_adabest_forgets_by_the_rounds_that_a_site_was_away(tmp_path: Path) -> None:
    played = Federation(AdaBest(mu=0.5, beta=0.0), tmp_path, {"a": 0.0, "b": 4.0}, ONE)
    played.play()  # h_a = 0.5 * (1 - 0.5) = 0.25, point 1.5
    played.play("b")
    played.play("b")
    point = played.point
    expected = point - 0.5 * (point - 0.25)
    assert played.locals("a") == pytest.approx(expected)
    played.play("a")  # three rounds after the last: h_a = 0.25 / 3 + 0.5 * drift
    record = SiteState(tmp_path / "a", "a").get("correction", before=99)
    assert record is not None
    assert float(record[0]["w"]) == pytest.approx(0.25 / 3 + 0.5 * (point - expected))


@pytest.mark.parametrize(
    ("strategy", "uniform"),
    [
        (FedNova(), False),
        (AdaBest(mu=0.0, beta=0.0), True),
        (Scaffold(), True),
    ],
)
def test_reductions_to_fedavg(strategy: IncrementalStrategy, uniform: bool, tmp_path: Path) -> None:
    samples = {"a": 1, "b": 1} if uniform else {"a": 3, "b": 1}
    mine = federation(strategy, tmp_path / "mine", {"a": 3, "b": 3}, samples=samples).play()
    plain = federation(FedAvg(), tmp_path / "plain", {"a": 3, "b": 3}, samples=samples).play()
    assert mine == pytest.approx(plain, abs=1e-6)


@settings(deadline=None)
@given(steps=st.integers(1, 200), momentum=st.floats(0.01, 0.99), pull=st.floats(0.01, 0.9))
def test_accumulated_weight_has_the_papers_closed_forms(steps: int, momentum: float, pull: float) -> None:
    assert accumulate_weight(steps) == steps
    closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert accumulate_weight(steps, momentum) == pytest.approx(closed, rel=1e-6)
    assert accumulate_weight(steps, pull=pull) == pytest.approx((1 - (1 - pull) ** steps) / pull, rel=1e-6)


def test_feddisco_by_hand() -> None:
    counts = np.array([[5, 5, 0], [10, 0, 0]])
    assert measure_discrepancies(counts) == pytest.approx([0.0, 1.0])
    # 0.5 - 0.5 * (0, 1) + 0.1 = (0.6, 0.1)
    assert compute_disco_weights([10, 10], measure_discrepancies(counts)) == pytest.approx([6 / 7, 1 / 7])
    assert compute_disco_weights([1, 3], np.array([9.0, 9.0])) == pytest.approx([0.25, 0.75])
    assert measure_discrepancies(np.array([[4, 4], [2, 2]])) == pytest.approx([0.0, 0.0])


def test_feddisco_weighs_the_updates_in_any_order() -> None:
    results = []
    for order in ("ab", "ba"):
        strategy = FedDisco()
        strategy.asked = True
        round_ = begun(strategy, {"w": torch.ones(1)}, stamp=replace(STAMP, num_classes=2))
        for site in order:
            counts = [5, 5] if site == "a" else [10, 0]
            update = {"w": torch.tensor([0.3 if site == "a" else -0.7])}
            round_.add(Admitted(site, update, 0.7, 10, metrics={"label_counts": counts}))
        results.append(round_.result()["w"])
        assert round_.ctx.outcome.details["weights"] == pytest.approx({"a": 6 / 7, "b": 1 / 7})
    assert torch.equal(*results)
    assert float(results[0]) == pytest.approx(1 + 0.3 * 6 / 7 - 0.7 / 7, abs=1e-6)


@pytest.mark.parametrize(
    "counts", [None, [], [0, 0], [1.5, 1], [True, 1], [-1, 3], "12", [10**12, 1], [9], [4, 4, 1], [1] * 10**5]
)
def test_label_counts_that_are_no_counts_are_rejected(counts: object) -> None:
    with pytest.raises(Rejected, match="label_counts"):
        check_counts(counts, 9, 2)


@pytest.mark.parametrize(
    ("stamp", "steps", "error"),
    [
        (STAMP, 0, Rejected),
        (STAMP, 10**9, Rejected),
        (None, 0, ConfigError),  # under Flower's own start(), where no app would ever tell them
        (None, 10**9, Rejected),
    ],
)
def test_fednova_needs_the_steps(stamp: Stamp | None, steps: int, error: type[Exception]) -> None:
    round_ = begun(FedNova(), {"w": torch.ones(1)}, stamp=stamp)
    with pytest.raises(error, match="steps"):
        round_.add(Admitted("a", {"w": torch.ones(1)}, 1.0, 5, steps=steps))


def one_round(strategy: FedNova, *replies: tuple[str, int, int]) -> tuple[float, list[str]]:
    """(where the model is after a round of (site, samples, steps) with updates of 1, warnings)."""
    round_ = begun(strategy, {"w": torch.zeros(1)}, stamp=STAMP)
    for site, samples, steps in replies:
        round_.add(Admitted(site, {"w": torch.ones(1)}, 1.0, samples, steps=steps))
    return float(round_.result()["w"]), round_.ctx.outcome.warnings


def fednova_of(privacy: dict[str, object] | None = None, **learner: object) -> FedNova:
    settings = {"preset": "none", "optimizer": {"lr": 0.1}, **learner}
    experiment = SimpleNamespace(
        learner=LearnerConfig.model_validate(settings), privacy=PrivacyConfig.model_validate(privacy or {})
    )
    strategy = FedNova()
    strategy.attach(cast(RunContext, SimpleNamespace(experiment=experiment)))
    return strategy


@pytest.mark.parametrize("lie", [1, 5, 7, 1_000_000])
def test_a_site_moves_the_model_by_no_steps_that_its_samples_do_not_allow(lie: int) -> None:
    strategy = fednova_of(epochs=2, batch_size=4)
    honest = ("a", 10, 6)
    assert one_round(strategy, honest, ("b", 10, 6)) == (pytest.approx(1), [])
    moved, warnings = one_round(strategy, honest, ("b", 10, lie))
    assert 0.5 <= moved < 1.001
    assert warnings == [f"site b: has {lie} local steps, and counts as 6 (its samples allow 6 to 6)"]


@settings(deadline=None)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 40),
    epochs=st.integers(1, 3),
    drop_single=st.booleans(),
)
def test_fednova_believes_what_a_site_trains(
    samples: int, batch_size: int, epochs: int, drop_single: bool
) -> None:
    data = TrainingSet(torch.zeros(samples, 1), torch.zeros(samples).long(), torch.zeros(1), torch.ones(1))
    batches = shuffle_batches(
        data, batch_size, np.random.default_rng(0), AugmentationConfig(), drop_single=drop_single
    )
    fewest, most = fednova_of(epochs=epochs, batch_size=batch_size).bound_steps(samples)
    assert fewest <= epochs * len([*batches]) <= most


def test_fednova_counts_the_public_steps_of_dp_sgd() -> None:
    privacy = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.3}
    strategy = fednova_of(privacy, epochs=2, batch_size=4)
    assert one_round(strategy, ("a", 1, 7), ("b", 1, 7)) == (pytest.approx(1), [])
    assert one_round(strategy, ("a", 1, 7), ("b", 1, 70))[1]


def test_overshooting_proximal_steps_are_refused_by_fednova(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.correction\.mu"):
        federation(FedNova(), tmp_path, lr=0.5, mu=2.0)


@pytest.mark.parametrize("strategy", [Scaffold(), FedDyn(), AdaBest()])
def test_state_survives_a_restart(strategy: IncrementalStrategy, tmp_path: Path) -> None:
    whole = federation(strategy, tmp_path)
    whole.play()
    again = type(strategy)()
    resumed = federation(again, tmp_path, point=whole.point, round=whole.round)
    again.load_state_dict(strategy.state_dict())
    assert resumed.play() == whole.play()


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    for strategy in (FedDyn(alpha=0.1), AdaBest(), FedNova(), Scaffold(server_lr=3.0)):
        round_ = begun(strategy, {"bn.weight": torch.ones(2), "bn.running_var": torch.ones(2)})
        for site, steps in (("a", 1), ("b", 9)):
            update = {"bn.weight": torch.ones(2), "bn.running_var": torch.full((2,), -0.9)}
            round_.add(Admitted(site, update, 2.0, 5, steps=steps))
        after = round_.result()
        assert after["bn.running_var"].tolist() == pytest.approx([0.1, 0.1])


def test_growth_keeps_old_rows_and_refuses_to_shrink() -> None:
    old = {"head": torch.arange(4.0).reshape(2, 2), "gone": torch.ones(1)}
    new = grown(old, {"head": torch.zeros(3, 2), "fresh": torch.full((1,), 7.0)})
    assert new["head"].tolist() == [[0, 1], [2, 3], [0, 0]]
    assert new.keys() == {"head", "fresh"}
    assert float(new["fresh"]) == 7
    with pytest.raises(StateError, match="'head'"):
        grown(old, {"head": torch.zeros(1, 2)})
    with pytest.raises(StateError, match="'head'"):
        grown(old, {"head": torch.zeros(3, 4)})


@pytest.mark.parametrize(
    "losses", [((2, "b"),), ((1, "a"), (3, "ab"), (6, "b")), ((2, "b"), (3, "b"), (4, "b"))]
)
@pytest.mark.parametrize("strategy", [FedDyn(alpha=1.0), Scaffold()], ids=["feddyn", "scaffold"])
def test_lost_replies_do_not_move_where_the_run_ends(
    strategy: IncrementalStrategy, losses: tuple[tuple[int, str], ...], tmp_path: Path
) -> None:
    """The optimum is 2.0; a site that kept what it stored for a lost reply would end elsewhere for good."""
    lost = dict(losses)
    played = federation(copy.deepcopy(strategy), tmp_path, ONE_TWO, lr=0.4)
    for number in range(1, 81):
        missing = lost.get(number, "")
        if missing == "ab":
            # no quorum: the round is not finished, and its replies are in no vector
            played.round += 1
            for name in OPTIMA:
                played._reply(name, played.round)
            continue
        played.play(lost=missing)
    assert played.point == pytest.approx(2.0, abs=1e-4)
