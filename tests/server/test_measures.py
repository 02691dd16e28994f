"""Each measure against a case worked out by hand, and against a formula that somebody else wrote."""

import math
import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, confusion_matrix, roc_auc_score

from perennial.learning.analytic.solve import Sums, solve_gaussian, solve_ridge
from perennial.learning.analytic.statistics import Collector
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.learning.evaluation_tables import (
    CONFIDENCE_BINS,
    SCORE_BINS,
    SCORE_EDGES,
    TEMPERATURES,
    EvaluationTables,
    score_bin_lower,
)
from perennial.learning.scored import Scored, bin_logits, compute_likelihoods, score_logits
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.feature_maps.projection import round_to_grid
from perennial.models.prediction import log_odds
from perennial.server.evaluation import Judge
from perennial.server.measures.assemble import (
    assemble,
    estimate_patient_intervals,
    measure_classes,
    measure_parts,
    point_values,
)
from perennial.server.measures.calibration import (
    compute_ece,
    compute_least_samples,
    compute_reliability,
    compute_threshold,
    compute_thresholds,
    estimate_calibration_error,
    fit_temperature,
    is_at_end,
)
from perennial.server.measures.headline import compute_predictive_values, describe_measures
from perennial.server.measures.record import (
    Calibration,
    ClassMeasures,
    Figure,
    Measures,
    PartMeasures,
    compute_pr_areas,
    compute_wilson_interval,
    estimate_auprc,
    estimate_auroc,
)
from perennial.server.report.recognition import build_parts_table, explain_brackets


def scored(
    seed: int = 0, samples: int = 400, classes: int = 4, sharpness: float = 2.0
) -> tuple[Scored, np.ndarray]:
    """(samples under a noisy classifier, its probabilities)."""
    logits, labels = noisy(seed, samples, classes, sharpness)
    return Scored(*bin_logits(logits, labels)), logits.double().softmax(dim=1).numpy()


def noisy(seed: int, samples: int, classes: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, labels) of a noisy classifier."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    logits = torch.randn(samples, classes, generator=generator)
    logits[torch.arange(samples), labels] += 1.5
    return logits * sharpness, labels


def test_shares_of_a_confusion_matrix_worked_out_by_hand() -> None:
    tables = EvaluationTables.empty(3)
    tables.confusion[...] = [[8, 1, 1], [2, 18, 0], [0, 5, 15]]
    first = measure_classes(tables, ["a", "b", "c"])[0]
    assert (first.samples, first.called) == (10, 10)
    assert first.sensitivity.value == pytest.approx(8 / 10)
    assert first.specificity.value == pytest.approx(38 / 40)
    assert first.positive_predictive_value.value == pytest.approx(8 / 10)
    assert first.negative_predictive_value.value == pytest.approx(38 / 40)
    whole = assemble(tables, ["a", "b", "c"], None, None, {}, {}, source="server", held_out=50)
    assert whole.accuracy.value == pytest.approx(41 / 50)
    assert whole.balanced_accuracy.value == pytest.approx((0.8 + 0.9 + 0.75) / 3)
    values = point_values(tables, None)
    assert values["specificity/1"] == pytest.approx(24 / 30)
    assert values["balanced_accuracy"] == pytest.approx((0.8 + 0.9 + 0.75) / 3)


def test_tables_count_what_the_probabilities_say() -> None:
    found, probabilities = scored()
    tables = found.build_tables()
    assert np.array_equal(tables.confusion, confusion_matrix(found.label, probabilities.argmax(axis=1)))
    odds = np.log(probabilities) - np.log1p(-probabilities)
    for label in range(4):
        bins = np.searchsorted(SCORE_EDGES - math.log(3), odds[:, label], side="right")
        own = found.label == label
        assert np.array_equal(tables.positive[label], np.bincount(bins[own], minlength=SCORE_BINS))
        assert np.array_equal(tables.negative[label], np.bincount(bins[~own], minlength=SCORE_BINS))
    assert np.array_equal(EvaluationTables.from_vector(tables.vector(), 4).vector(), tables.vector())
    half = np.arange(len(found)) < 100
    assert np.array_equal(
        (found.pick(half).build_tables() + found.pick(~half).build_tables()).vector(), tables.vector()
    )
    weighted = found.build_tables(np.where(half, 2, 0).astype(np.int64))
    assert np.array_equal(weighted.vector(), 2 * found.pick(half).build_tables().vector())
    with pytest.raises(ValueError, match="expected"):
        EvaluationTables.from_vector(tables.vector()[:-1], 4)


def test_a_sample_without_an_answer_is_as_far_from_every_class_as_can_be() -> None:
    found = Scored(*bin_logits(torch.full((1, 3), torch.nan), torch.tensor([1])))
    assert found.score.tolist() == [[0, 0, 0]]
    assert found.confidence.tolist() == [[0, 0]]


def test_every_sample_is_scored_in_batches_too() -> None:
    count = 2 * EVALUATION_BATCH + 3
    labels = torch.arange(count) % 3
    data = TrainingSet(torch.eye(3)[labels], labels, torch.zeros(3), torch.ones(3))
    found = score_logits(lambda inputs: inputs, data, 3)
    assert found.label.tolist() == found.predicted.tolist() == labels.tolist()


def test_areas_agree_with_another_implementation() -> None:
    found, shares = scored(samples=300)
    tables = found.build_tables()
    for label in range(4):
        own = (found.label == label).astype(int)
        area = estimate_auroc(tables.positive[label], tables.negative[label])
        assert area.value == pytest.approx(roc_auc_score(own, found.score[:, label]), abs=1e-12)
        precision = estimate_auprc(tables.positive[label], tables.negative[label])
        # within a bin the class's samples stand evenly among the others
        assert precision.value == pytest.approx(average_precision_score(own, shares[:, label]), abs=0.004)
        low, value, high = area.low, area.value, area.high
        assert low is not None and value is not None and high is not None and low < value < high


def test_delongs_interval_against_all_pairs() -> None:
    generator = np.random.default_rng(1)
    ones, zeros = generator.integers(3, 9, 40), generator.integers(0, 7, 60)
    found = estimate_auroc(np.bincount(ones, minlength=10), np.bincount(zeros, minlength=10))
    wins = (ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)
    error = math.sqrt(wins.mean(axis=1).var(ddof=1) / 40 + wins.mean(axis=0).var(ddof=1) / 60)
    assert found.value == pytest.approx(wins.mean())
    odds = math.log(wins.mean() / (1 - wins.mean()))
    half = 1.959964 * error / (wins.mean() * (1 - wins.mean()))
    assert found.low == pytest.approx(1 / (1 + math.exp(half - odds)), abs=1e-6)
    assert found.high == pytest.approx(1 / (1 + math.exp(-half - odds)), abs=1e-6)


def test_calibration_error_worked_out_by_hand() -> None:
    confidence = np.zeros((2, CONFIDENCE_BINS), dtype=np.int64)
    # ten answers of probability 0.955, nine right; ten of 0.555, three right
    confidence[0, 95], confidence[1, 95] = 10, 9
    confidence[0, 55], confidence[1, 55] = 10, 3
    expected = 0.5 * abs(0.955 - 0.9) + 0.5 * abs(0.555 - 0.3)
    assert compute_ece(confidence) == pytest.approx(expected)
    figure = estimate_calibration_error(confidence)
    assert figure.value == pytest.approx(expected) and figure.low is not None and figure.low < expected
    assert [(g.samples, g.right) for g in compute_reliability(confidence)] == [(10, 0.3), (10, 0.9)]
    assert compute_ece(np.zeros((2, CONFIDENCE_BINS), dtype=np.int64)) is None


def fitted(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature that samples of these logits choose."""
    data = TrainingSet(logits, labels, torch.zeros(logits.shape[1]), torch.ones(logits.shape[1]))
    tables = EvaluationTables.empty(logits.shape[1])
    tables.likelihood[...], tables.validation[0] = compute_likelihoods(lambda x: x, data), len(labels)
    found = fit_temperature(tables)
    assert found is not None
    return found


def test_the_temperature_is_that_of_the_least_loss_and_mends_overconfidence() -> None:
    logits, labels = noisy(0, 4000, 4, 4.0)
    tables = Scored(*bin_logits(logits, labels)).build_tables()
    temperature = fitted(logits, labels)
    # logits are 4 times those of a model that is nearly calibrated at 1.5
    assert temperature in TEMPERATURES and 2.0 <= temperature <= 4.0 and not is_at_end(temperature)
    tables = Scored(*bin_logits(logits, labels, temperature)).build_tables()
    before, after = map(compute_ece, tables.confidence)
    assert before is not None and after is not None and after < before / 4
    assert fit_temperature(tables) is None


def test_an_error_that_chance_explains_is_no_headline() -> None:
    wrong = Calibration(scaled_error=Figure(value=0.2), by_chance=Figure(value=0.15, high=0.19))
    assert "wrong by 20 points" in describe_measures(measures([0.9, 0.8], calibration=wrong))[0]
    chance = wrong.model_copy(update={"by_chance": Figure(value=0.15, high=0.3)})
    assert len(describe_measures(measures([0.9, 0.8], calibration=chance))) == 1


HEADS = {
    "gaussian": lambda sums: solve_gaussian(sums, 0.1),
    "gaussian, hardly shrunk": lambda sums: solve_gaussian(sums, 0.003),
    "ridge": lambda sums: solve_ridge(sums, 1e-3, standardise=True),
    "ridge, hardly shrunk": lambda sums: solve_ridge(sums, 1e-5),
}


@pytest.mark.parametrize("classes, samples", [(2, 40), (10, 200)])
@pytest.mark.parametrize("head", HEADS)
def test_figures_from_tables_are_those_of_the_exact_probabilities(
    head: str, classes: int, samples: int
) -> None:
    """AUROC, AUPRC and calibration error within .005, of heads with log odds of thousands or thousandths."""
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(samples)
    # noise without which two of these digits would be told apart without a mistake
    pixels = pixels.float() + 6 * torch.randn(pixels.shape, generator=generator)
    rows = (digits < classes).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=generator)]
    features = round_to_grid(torch.relu((pixels[rows] - 8) @ torch.randn(64, 150, generator=generator)))
    labels = digits[rows]
    train, chosen, judged = slice(0, samples), slice(samples, samples + samples // 3), slice(-samples, None)
    collector = Collector(150, range(classes))
    collector.add(features[train], labels[train])
    scores = HEADS[head](Sums.of(collector.finish())).scores(features)
    temperature = fitted(scores[chosen], labels[chosen])
    assert not is_at_end(temperature)
    tables = Scored(*bin_logits(scores[judged], labels[judged], temperature)).build_tables()
    exact, truth = (scores[judged] / temperature).softmax(dim=1).numpy(), labels[judged].numpy()
    odds = log_odds(scores[judged] / temperature).numpy()
    precisions, apart = compute_pr_areas(tables.positive, tables.negative), []
    for label in range(classes):
        own = truth == label
        found = estimate_auroc(tables.positive[label], tables.negative[label]).value
        assert found == pytest.approx(roc_auc_score(own, odds[:, label]), abs=0.005)
        found, wanted = precisions[label], average_precision_score(own, odds[:, label])
        # a tie of the best of few samples with one of another class moves the area by half of its share
        assert found == pytest.approx(wanted, abs=max(0.005, 0.5 / own.sum()))
        apart.append(found - wanted)
    assert abs(np.mean(apart)) < 0.005
    top, right = exact.max(axis=1), exact.argmax(axis=1) == truth
    groups = np.minimum((top * 20).astype(int), 19)
    error = sum(abs((top - right)[groups == group].sum()) for group in range(20)) / len(truth)
    assert compute_ece(tables.confidence[1]) == pytest.approx(error, abs=0.005)


def test_thresholds_worked_out_by_hand() -> None:
    scores = np.zeros(SCORE_BINS, dtype=np.int64)
    scores[[20, 60, 80, 100]] = 1, 2, 3, 4
    # n = 10, coverage 0.9: rank ceil(9.9) = 10, the least probable of all: the lower edge of bin 20
    assert compute_threshold(scores, 0.9, 3).log_odds == score_bin_lower(20, 3)
    # coverage 0.8: rank ceil(8.8) = 9, the second least probable
    assert compute_threshold(scores, 0.8, 3).log_odds == score_bin_lower(60, 3)
    # coverage 0.95: rank 11 is beyond n, so the class is always in the set
    beyond = compute_threshold(scores, 0.95, 3)
    assert (beyond.log_odds, beyond.informative, beyond.samples) == (-math.inf, False, 10)
    assert [compute_least_samples(coverage) for coverage in (0.9, 0.95, 0.8)] == [9, 19, 4]
    nine = np.zeros(SCORE_BINS, dtype=np.int64)
    nine[64] = 9
    assert compute_threshold(nine, 0.9, 3).informative
    nine[64] = 8
    assert not compute_threshold(nine, 0.9, 3).informative


def test_sets_cover_each_class_as_stated() -> None:
    """Over many draws of calibration samples the sets hold the true class in at least 80 % of each class."""
    pool, _ = scored(seed=3, samples=20_000)
    generator = np.random.default_rng(5)
    covered = np.zeros(4)
    rounds = 60
    for _ in range(rounds):
        drawn = generator.permutation(len(pool))
        bounds = compute_thresholds(pool.pick(drawn[:160]).scores()[0], 0.8)
        fresh = pool.pick(drawn[160:2160])
        lower = np.array([score_bin_lower(index, 4) for index in range(SCORE_BINS)])
        for label in range(4):
            mine = fresh.score[fresh.label == label, label]
            covered[label] += (lower[mine] >= bounds[label].log_odds).mean() / rounds
    # about 40 calibration samples a class, and bins of a 29th of the score: 0.80 to 0.80 + 1/41 + a bin
    assert (covered > 0.785).all() and (covered < 0.87).all()


def test_drawing_patients_widens_intervals_where_a_patient_has_several_samples() -> None:
    few, _ = scored(samples=60)
    repeated = few.pick(np.repeat(np.arange(60), 8))
    patients = np.repeat(np.arange(60), 8)
    drawn = estimate_patient_intervals(repeated, patients, None)["accuracy"]
    naive = compute_wilson_interval(sum(repeated.correct), len(repeated))
    alone = compute_wilson_interval(sum(few.correct), len(few))
    assert (
        naive.low is not None and naive.high is not None and alone.low is not None and alone.high is not None
    )
    assert drawn[1] - drawn[0] > 2 * (naive.high - naive.low)
    assert drawn[1] - drawn[0] == pytest.approx(alone.high - alone.low, rel=0.2)


def test_at_perfect_figures_an_interval_over_patients_rests_on_as_many_trials_as_patients() -> None:
    """Every draw is perfect, too: a width of 0 would say more than twelve patients of a class can."""
    labels = torch.arange(4).repeat_interleave(24)
    found = Scored(*bin_logits(20.0 * torch.nn.functional.one_hot(labels, 4), labels))
    ends = estimate_patient_intervals(found, np.arange(96) // 2, None)
    measures = assemble(
        found.build_tables(), list("abcd"), ends, None, {}, {}, source="external", held_out=96
    )
    whole, own, others = (compute_wilson_interval(count, count) for count in (48, 12, 36))
    assert measures.accuracy == whole and "(95 % interval 93 to 100)" in " ".join(measures.headline)
    assert measures.balanced_accuracy == own
    for each in measures.classes:
        assert each.sensitivity == each.positive_predictive_value == own
        assert each.specificity == each.negative_predictive_value == others
        for figure in (each.auroc, each.auprc, measures.macro_auroc, measures.macro_auprc):
            assert (figure.value, figure.high) == (1, 1) and figure.low == pytest.approx(own.low)
    error = measures.calibration.error
    assert error.low == 0 and error.high is not None and error.high > 0.05
    for figure in compute_predictive_values(measures, "a", 0.02):
        assert figure.low is not None and figure.value is not None and figure.low < figure.value == 1


def test_patients_who_are_all_alike_are_as_many_trials() -> None:
    once, _ = scored(samples=400)
    right = once.label == once.predicted
    pairs = [once.pick(np.flatnonzero(rows)[:10]) for rows in (right, ~right)]
    arrays = zip(*(vars(each).values() for each in pairs), strict=True)
    found = Scored(*(np.concatenate(both) for both in arrays))
    low, high = estimate_patient_intervals(found, np.arange(20) % 10, None)["accuracy"]
    ten = compute_wilson_interval(5, 10)
    assert (low, high) == pytest.approx((ten.low, ten.high))


def test_a_report_says_which_intervals_take_samples_as_independent() -> None:
    found = Measures(source="server", samples=1, held_out=1)
    assert explain_brackets(found).endswith("for which samples are independent.")
    drawn = explain_brackets(found.model_copy(update={"interval": "patients"}))
    assert "patients are drawn" in drawn and "those of sites, subgroups, prediction sets" in drawn


def test_a_site_with_many_samples_of_a_difficult_class_is_not_served_worse_for_that() -> None:
    easy, hard = np.array([[900, 855, 900], [100, 40, 100]]), np.array([[100, 95, 100], [900, 360, 900]])
    found = measure_parts({"easy": easy, "hard": hard}, ["x", "y"])
    said = build_parts_table("By site", "site", found)
    assert "y: 40\N{NARROW NO-BREAK SPACE}% [37, 43] of 900" in re.sub(r"<.*?>", "", said)
    assert found["hard"].accuracy.value == 0.455 and found["hard"].expected == pytest.approx(0.455)
    assert not found["hard"].lower
    worse = measure_parts({"easy": easy, "hard": hard - [[0, 9, 0], [0, 60, 0]]}, ["x", "y"])
    assert worse["hard"].lower and not worse["easy"].lower
    assert worse["hard"].expected == pytest.approx(0.455)
    alone = measure_parts({"a": np.array([[50, 40, 50]]), "b": np.array([[50, 45, 50]])}, ["x"])
    assert alone["a"].expected == 0.9 and not alone["a"].lower


def measures(sensitivities: list[float], called: list[int] | None = None, **more: object) -> Measures:
    classes = [
        ClassMeasures(
            name=f"class {index}",
            samples=50,
            called=(called or [50] * len(sensitivities))[index],
            sensitivity=compute_wilson_interval(round(50 * share), 50),
        )
        for index, share in enumerate(sensitivities)
    ]
    mean = sum(sensitivities) / len(sensitivities)
    fields = {
        "source": "server",
        "samples": 50 * len(classes),
        "held_out": 50 * len(classes),
        "classes": classes,
        "accuracy": compute_wilson_interval(round(50 * mean * len(classes)), 50 * len(classes)),
        "balanced_accuracy": Figure(value=mean, low=mean - 0.05, high=mean + 0.05),
        **more,
    }
    return Measures.model_validate(fields)


def test_a_headline_says_what_is_wrong_first() -> None:
    found = describe_measures(measures([0.9, 0.0, 0.8, 0.0, 0.3]))
    assert found[0] == "Two of five classes are never recognised: class 1, class 3."
    assert found[1] == "Recognised in less than half of their cases: class 4 (30 %)."
    assert found[-1].startswith("Of 250 samples 40 % are classified correctly (95 % interval 34 to 46)")
    collapsed = describe_measures(measures([1.0, 0.0, 0.0], called=[150, 0, 0]))
    assert collapsed[0] == "The model calls every sample class 0: it has not learnt to tell classes apart."
    assert any("cannot tell from guessing (33 %)" in sentence for sentence in collapsed)
    assert len(describe_measures(measures([0.9, 0.8]))) == 1
    worse = {"north": PartMeasures(samples=10, accuracy=compute_wilson_interval(1, 10), lower=True)}
    assert (
        "Served worse than the others, class for class and beyond chance, by site: north (10 %)."
        in describe_measures(measures([0.9, 0.8], sites=worse))
    )
    nothing = Measures(source="sites", samples=0, held_out=0)
    assert describe_measures(nothing) == ["Nobody measured how well the model recognises the classes."]


def test_a_model_is_judged_on_the_same_samples_of_seen_classes_only() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
    test = TrainingSet(x, y, torch.zeros(5), torch.ones(5))
    model = build_model(ModelConfig.model_validate({"name": "mlp", "hidden": [8]}), (5,), 2, seed=1).eval()
    whole = Judge(test, num_classes=2, samples=1000, seed=4)
    logits = model(x[y < 2]).detach()
    scores = whole(model)
    assert scores.labels.tolist() == y[y < 2].tolist()
    assert scores.right.tolist() == (logits.argmax(dim=1) == y[y < 2]).tolist()
    likelihood = torch.nn.functional.cross_entropy(logits, y[y < 2], reduction="none").neg().exp()
    assert torch.allclose(torch.from_numpy(scores.probability).float(), likelihood)
    part = [Judge(test, num_classes=2, samples=10, seed=4)(model) for _ in range(2)]
    assert part[0].probability.tolist() == part[1].probability.tolist()
    assert np.bincount(part[0].labels).tolist() == [5, 5], "as many of each class as of the others"
    # a rare class is there with all that there is of it
    rare = TrainingSet(x, (torch.arange(60) >= 3).long(), test.mean, test.std)
    assert np.bincount(Judge(rare, num_classes=2, samples=10, seed=4)(model).labels).tolist() == [3, 7]
