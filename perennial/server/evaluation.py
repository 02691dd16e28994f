"""Measures the global model: on the server's test set, if there is one, and at the sites."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.cache import open_machine_features
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import count_head_correct
from perennial.learning.evaluation_tables import MOST_CLASSES
from perennial.learning.scored import Scored, Scores, score
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel
from perennial.server.position import Position
from perennial.strategies.round.context import RunContext

Counts = tuple[list[int], list[int]]
"""(right answers, samples) of each class."""
ReportedCounts = tuple[list[int], list[int | None]]
"""The same from sites; samples None: withheld by the site's floor, so that nobody knows their number."""


def evaluate_centrally(model: IncrementalModel, test: TrainingSet, num_classes: int) -> Counts:
    """Counts of right answers and samples by class, over the classes seen so far.

    test: samples of all classes, in any order. num_classes: seen so far.
    """
    seen = (test.y < num_classes).nonzero().flatten()
    return count_head_correct(model, test, num_classes, open_machine_features(), seen)


class Judge:
    """Evaluates models on a fixed draw of at most `samples` test samples of the classes seen so far.

    Every class has as many of them as the others, as far as the test set goes. The inputs are converted once,
    because a model is judged after every turn of a ring, and so are features that nobody trains. Raises
    ConfigError when there is no such sample.
    """

    def __init__(self, test: TrainingSet, num_classes: int, samples: int, seed: int) -> None:
        self.asked = num_classes, samples
        seen = (test.y < num_classes).nonzero().flatten()
        if len(seen) == 0:
            raise ConfigError(
                f"data.test_fraction: the server's held-out samples have none of the {num_classes} classes "
                "seen so far, so that no model can be valued; allowed at least one"
            )
        drawn = seen[
            torch.from_numpy(stream(seed, "judge", num_classes).permutation(len(seen))).to(seen.device)
        ]
        # one of each class, then another of each, until there are enough
        rank = torch.empty_like(drawn)
        for label in test.y[drawn].unique():
            own = (test.y[drawn] == label).nonzero().flatten()
            rank[own] = torch.arange(len(own), device=own.device)
        rows = drawn[rank.argsort(stable=True)[:samples]].sort().values
        self._inputs, self._labels = test.inputs(rows), test.y[rows]
        self._features: Tensor | None = None

    @torch.no_grad()
    def __call__(self, model: IncrementalModel) -> Scores:
        """The answers of a model in evaluation mode."""
        if isinstance(model.backbone, FixedFeatures):
            if self._features is None:
                self._features = model.features(self._inputs).detach()
            logits = model.classify(self._features)
        else:
            logits = model(self._inputs)
        right = logits.argmax(dim=1) == self._labels
        true = logits.double().softmax(dim=1).gather(1, self._labels[:, None]).squeeze(1)
        return Scores(
            self.asked[0], self._labels.cpu().numpy(), right.cpu().numpy(), true.nan_to_num(0.0).cpu().numpy()
        )


class CentralEvaluation:
    """Evaluates the global model on the server's test samples of the classes seen so far.

    samples: of all classes; None: the server has none, and every result is None.
    """

    def __init__(self, position: Position, samples: TrainingSet | None) -> None:
        self._position, self._model, self._samples = position, position.model, samples
        self._latest: Judge | None = None

    def counts(self) -> Counts | None:
        """The model's right answers and samples by class, or None."""
        return None if self._samples is None else self._evaluate_arrays(self._samples, self._model.arrays)

    def scored(self, temperature: float | None) -> Scored | None:
        """Scores of the global model on the server's samples of all classes seen so far.

        temperature: for probabilities, fitted on the sites' validation samples, or None. Returns None without
        samples, with evaluation.measures false, or with more than MOST_CLASSES classes; counts of right
        answers then suffice.
        """
        classes, samples = self._position.num_classes, self._samples
        if samples is None or not self._position.experiment.evaluation.measures or classes > MOST_CLASSES:
            return None
        seen = (samples.y < classes).nonzero().flatten()
        with self._model.measuring():
            return score(
                self._model.load_current(), samples, None, open_machine_features(), seen, temperature
            )

    @property
    def patients(self) -> np.ndarray | None:
        """Patient of each sample that scored() measures; None without patients, and before the last task."""
        samples, position = self._samples, self._position
        # the bootstrap over patients is worth its time for the figures that stay
        if samples is None or samples.patients is None or position.progress.task != position.schedule.count:
            return None
        return samples.patients[samples.y.cpu() < position.num_classes].numpy()

    def lend(self, run: RunContext) -> RunContext:
        """The context that a strategy gets, with functions that evaluate models on the server's samples."""
        samples = self._samples
        if samples is None:
            return run

        def judge(most: int) -> Judge:
            asked = self._position.num_classes, most
            if self._latest is None or self._latest.asked != asked:
                self._latest = Judge(samples, *asked, self._position.experiment.seed)
            return self._latest

        def measure(arrays: Mapping[str, Tensor]) -> Counts:
            return self._evaluate_arrays(samples, arrays)

        def judge_arrays(arrays: Mapping[str, Tensor], most: int) -> Scores:
            return judge(most)(self._model.load_arrays(arrays))

        return replace(run, measure=measure, judge=judge_arrays)

    def _evaluate_arrays(self, samples: TrainingSet, arrays: Mapping[str, Tensor]) -> Counts:
        with self._model.measuring():
            return evaluate_centrally(self._model.load_arrays(arrays), samples, self._position.num_classes)


def withhold_counts(
    correct: Sequence[int], total: Sequence[int], withheld: Sequence[int] | None
) -> ReportedCounts:
    """(right answers, samples) by class as a site reports them; samples None for a withheld class."""
    hidden = set(withheld or ())
    return list(correct), [None if label in hidden else samples for label, samples in enumerate(total)]


def pool_counts(counts: Iterable[ReportedCounts], num_classes: int) -> ReportedCounts:
    """Add up sites' counts; samples are None for a class that a site withholds and no other site reports."""
    correct, total = [0] * num_classes, [0] * num_classes
    hidden: set[int] = set()
    for right, samples in counts:
        correct = [a + b for a, b in zip(correct, right, strict=True)]
        total = [a + (b or 0) for a, b in zip(total, samples, strict=True)]
        hidden |= {label for label, found in enumerate(samples) if found is None}
    return correct, [None if label in hidden and not found else found for label, found in enumerate(total)]
