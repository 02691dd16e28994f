"""Finds signs that a model has stopped learning, in its measures and its training loss, and what to try."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perennial.config.experiment import Experiment
from perennial.models.config import CONVOLUTIONAL

FEWEST_ROUNDS = 3
"""Of a task, for its loss to be called flat."""
LEAST_FALL = 0.02
"""Share of its first value by which the loss of a task that learns falls at least."""
FEWEST_UNSEEN = 4
"""Of samples of all classes that are never recognised: one right half the time misses them once in 16."""
POWER = 1.28
"""In standard errors: nine draws of ten lie above their mean less so many."""
STRONG_CONTRAST = 0.5
FAST_SGD = 0.02


@dataclass(frozen=True)
class LossCourse:
    """The training loss over the rounds of a task, in a fixed number of fields.

    rounds: those that reported a loss. smallest: after the first round. finite: whether all losses were.
    """

    rounds: int = 0
    first: float | None = None
    smallest: float | None = None
    last: float | None = None
    finite: bool = True

    def add_round(self, loss: float | None) -> "LossCourse":
        """The course with one round more; loss None: the round reported none."""
        if loss is None:
            return self
        if not math.isfinite(loss):
            return LossCourse(self.rounds + 1, self.first, self.smallest, self.last, finite=False)
        if self.first is None:
            return LossCourse(self.rounds + 1, loss, None, loss, self.finite)
        smallest = loss if self.smallest is None else min(self.smallest, loss)
        return LossCourse(self.rounds + 1, self.first, smallest, loss, self.finite)

    @classmethod
    def of(cls, losses: Iterable[float | None]) -> "LossCourse":
        """The course of these rounds."""
        course = cls()
        for loss in losses:
            course = course.add_round(loss)
        return course

    @property
    def flat(self) -> str:
        """In words, that the loss has not fallen; '' if it has, or if too few rounds reported one."""
        first, smallest, last = self.first, self.smallest, self.last
        if self.rounds < FEWEST_ROUNDS or first is None or smallest is None or last is None:
            return ""
        if smallest <= (1 - LEAST_FALL) * first:
            return ""
        return f"the training loss has not fallen in {self.rounds} rounds ({first:.3g} to {last:.3g})"


def find_signs_of_stopping(
    correct: Sequence[int], total: Sequence[int | None], losses: LossCourse
) -> list[str]:
    """In words, why a model is taken to have learnt nothing; [] if it has learnt, or if nobody can tell.

    correct, total: right answers and samples of each class seen so far; None: not known. losses: of the
    rounds of the latest task.
    Accuracy counts before the loss, which is flat too when everything is learnt already: a flat loss alone is
    a sign only if nothing was measured.
    """
    if not losses.finite:
        return ["the training loss is no number any more"]
    flat = [losses.flat] if losses.flat else []
    counts = [(right, samples) for right, samples in zip(correct, total, strict=True) if samples]
    if not counts or None in total:
        return flat
    signs = []
    unseen = sum(samples for right, samples in counts if not right)
    if len(counts) > 1 and sum(right > 0 for right, _ in counts) <= 1 and unseen >= FEWEST_UNSEEN:
        signs = [f"of {len(counts)} classes the model recognises {'one' if any(correct) else 'none'}"]
    elif _is_chance(counts):
        share = sum(right for right, _ in counts) / sum(samples for _, samples in counts)
        signs = [f"its accuracy, {100 * share:.1f} %, cannot be told from that of guessing"]
    return signs + flat if signs else []


def _is_chance(counts: Sequence[tuple[int, int]]) -> bool:
    """Whether neither accuracy is above guessing by more than twice its standard error, on enough samples.

    The plain one is compared with always naming the most frequent class, the balanced one with 1 / M.
    Samples are enough if a model halfway between guessing and no error would pass nine times in ten.
    """
    classes, samples = len(counts), sum(n for _, n in counts)
    if classes < 2:
        return False
    guess, chance = max(n for _, n in counts) / samples, 1 / classes
    plain = (sum(right for right, _ in counts) / samples, guess, math.sqrt(guess * (1 - guess) / samples))
    spread = math.sqrt(sum(chance * (1 - chance) / n for _, n in counts)) / classes
    balanced = (sum(right / n for right, n in counts) / classes, chance, spread)
    above = any(found > guessing + 2 * error for found, guessing, error in (plain, balanced))
    told = any((2 + POWER) * error <= (1 - guessing) / 2 for _, guessing, error in (plain, balanced))
    return told and not above


def suggest_settings(experiment: Experiment) -> list[str]:
    """The settings of this experiment that most often make learning stop, and what to put in their place."""
    learner, model = experiment.learner, experiment.model
    if not experiment.strategy.trains:
        return [
            "look at the labels and the samples: perennial check EXPERIMENT",
            "other feature maps (model)",
        ]
    tries = []
    if learner.contrastive is not None and learner.contrastive.weight >= STRONG_CONTRAST:
        tries.append("leave learner.contrastive out, whose weight outdoes the loss over the labels")
    if learner.optimizer.name == "sgd" and learner.optimizer.lr >= FAST_SGD:
        tries.append(
            "learner.optimizer: {name: adam, lr: 0.001}, or leave learner out, which takes the default"
        )
    if model.backbone_name in (*CONVOLUTIONAL, "mlp") and model.resolved_norm == "none":
        tries.append("model.norm: group")
    if experiment.privacy.enabled:
        tries.append("less noise, or more records and sites for the same epsilon (perennial epsilon)")
    return [
        *tries,
        "a tenth of learner.optimizer.lr, or more tasks.rounds",
        "strategy: analytic, in which no step can be too long",
    ]
