"""Five leaks, planted one at a time: what twin runs must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from perennial.client import held_out, release, training_samples, training_turn
from perennial.client import site as client_site
from perennial.client.site import Site
from perennial.foundation.errors import PolicyRefusal
from perennial.learning.evaluation import count_head_correct
from perennial.server.journal import Journal
from tests.privacy.twins.cases import MODES, Case

Leak = Callable[[], Any]


@contextmanager
def mean_in_the_journal() -> Iterator[None]:
    """The operator's journal holds the mean of the data that this process has read."""
    write = Journal.write

    def leaking(self: Journal, event: str, **facts: Any) -> None:
        means = [
            float(data.x.double().mean())
            for held in client_site._processes.values()
            for data in held.data.values()
        ]
        write(self, event, **facts, brightness=means)

    # a site that is kept in memory, as simulated ones are, so that the server could look
    with patch.object(Journal, "write", leaking):
        yield


@contextmanager
def count_in_a_refusal() -> Iterator[None]:
    """A site that has trained refuses where its samples are too few, and says how many there are."""
    typed = training_turn.TrainingTurn._build_fields

    def leaking(self: training_turn.TrainingTurn, result: Any) -> Any:
        site, request = self.site, self.request
        classes = site.find_task_range(request)
        samples = len(site.data.find_task_indices("train", classes.start, classes.stop))
        if samples < site.identity.policy.min_samples:
            raise PolicyRefusal(
                f"policy.min_samples: found {samples}, allowed {site.identity.policy.min_samples}"
            )
        return typed(self, result)

    # every error after the data were read has one text, which this one escapes
    told = patch.object(training_samples, "note_data_read", lambda **_: None)
    with patch.object(training_turn.TrainingTurn, "_build_fields", leaking), told:
        yield


@contextmanager
def uncharged_evaluation() -> Iterator[None]:
    """Counts of right answers leave without a charge."""
    with (
        patch.object(training_samples, "charge_first", lambda *_: None),
        patch.object(held_out, "pay", lambda _, released: release.restore_paid(released.value)),
    ):
        yield


@contextmanager
def normalisation_constant() -> Iterator[None]:
    """Training takes the mean of the site's own data in the place of the public constant."""
    samples = Site.samples

    def leaking(self: Site, indices: Any, exemplars: int = 0, hidden: bool = False) -> Any:
        found = samples(self, indices, exemplars, hidden)
        own = (self.data.x.double() / 255).mean().to(found.mean.dtype)
        changed: dict[str, Any] = vars_of(found) | {"mean": torch.full_like(found.mean, float(own))}
        return type(found)(**changed)

    with patch.object(Site, "samples", leaking):
        yield


@contextmanager
def validation_choice() -> Iterator[None]:
    """A site weighs its update by how the model does on its own validation samples."""
    typed = training_turn.TrainingTurn._build_fields

    def leaking(self: training_turn.TrainingTurn, result: Any) -> Any:
        site, request = self.site, self.request
        rows = site.data.find_task_indices("validation", 0, request.num_classes)
        model, _ = site.models.load(request.num_classes, request.arrays, site.load_previous_model(request))
        right, total = count_head_correct(model, site.samples(rows), request.num_classes, site.feature_folder)
        result.update.mul_((1 + sum(right)) / (1 + sum(total)))
        return typed(self, result)

    with patch.object(training_turn.TrainingTurn, "_build_fields", leaking):
        yield


def vars_of(found: Any) -> dict[str, Any]:
    """The fields of a training set, without what it has computed."""
    return {name: getattr(found, name) for name in type(found).__dataclass_fields__}


LEAKS: dict[str, tuple[Leak, Case]] = {
    "a mean in the journal": (mean_in_the_journal, Case("sample", MODES["sample"])),
    "a count in a refusal": (count_in_a_refusal, Case("sample", MODES["sample"], "floor")),
    "an uncharged evaluation": (uncharged_evaluation, Case("sample, counts", MODES["sample, counts"])),
    "a normalisation constant": (normalisation_constant, Case("sample", MODES["sample"])),
    "a validation choice": (validation_choice, Case("sample", MODES["sample"])),
}
"""Each with the case in which it is planted."""
