"""A site's turn in one round, in three steps: open it, train, reply.

One site does them one after the other. Sites of a cohort open theirs, train in one pass, and reply.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from perennial.client.policy import (
    check_answer,
    check_floor,
    check_update,
    find_withheld,
    hides_count,
    is_exempt,
)
from perennial.client.release import Typed, contain_errors, leave
from perennial.client.site import Site
from perennial.client.training_samples import choose, find_training_indices
from perennial.config import charges
from perennial.config.rounds import AdversaryKind
from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import build_head_classifier, count_correct
from perennial.learning.site_method import LocalTurn, SiteMethods, TurnStart
from perennial.learning.training import TrainingResult, find_fewest_samples, train
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.models.layers import explain_stale_tensors
from perennial.privacy.noise import Noise
from perennial.privacy.protection import protect_update
from perennial.privacy.released import Mechanism, Public, Released
from perennial.protocol.measurements import (
    CLASS_COVERAGE,
    CLASSIFICATION_LOSS,
    HELD_OUT_ACCURACY,
    LABEL_COUNTS,
    TRAIN_ACCURACY,
    parse_measurements,
)
from perennial.protocol.messages import TrainReply, TrainRequest
from perennial.protocol.tensors import Tensors

if TYPE_CHECKING:
    from perennial.learning.bayesian_estimate import NeighbourDistances
    from perennial.learning.cohort_training import Member


def measure_training(
    site: Site, request: TrainRequest, model: IncrementalModel, indices: Tensor, result: TrainingResult
) -> dict[str, Any]:
    """The measurements that the request's settings ask for, by name.

    model: as trained. indices: of the samples that it was trained on. result: of that training. Raises
    ProtocolError on an unknown measurement, PolicyRefusal below the floor.
    """
    names = parse_measurements(request.settings)
    policy = site.identity.policy
    if names:
        check_floor(policy, "measurements", len(indices))

    def measure_accuracy(of: Tensor, *, held_out: bool = False) -> float | None:
        if len(of) < policy.min_samples and not is_exempt(policy, "measurements"):
            return None
        model.eval()
        with site.measuring():
            counts = count_correct(build_head_classifier(model), site.samples(of), request.num_classes)
        correct, total = map(sum, counts)
        if held_out and find_withheld(policy, "measurements", [total], [correct]):
            return None
        return correct / total if total else None

    def measure_held_out() -> float | None:
        if "evaluate" not in policy.answers:
            return None
        return measure_accuracy(
            site.data.find_task_indices("validation", 0, request.num_classes), held_out=True
        )

    def count_labels() -> list[int]:
        return site.data.y[indices].bincount(minlength=request.num_classes).tolist()

    def measure_coverage() -> float:
        found = count_labels()
        stay = find_withheld(policy, "measurements", found)
        held = torch.tensor([n > 0 and label not in stay for label, n in enumerate(found)])
        return float(held.float().mean())

    def report_counts() -> list[int | None]:
        found = count_labels()
        stay = find_withheld(policy, "measurements", found)
        return [None if label in stay else n for label, n in enumerate(found)]

    measure: dict[str, Callable[[], Any]] = {
        HELD_OUT_ACCURACY: measure_held_out,
        TRAIN_ACCURACY: lambda: measure_accuracy(indices),
        CLASSIFICATION_LOSS: lambda: result.classification,
        CLASS_COVERAGE: measure_coverage,
        LABEL_COUNTS: report_counts,
    }
    found = {name: measure[name]() for name in names}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class TrainingTurn:
    """An opened turn: the site has agreed, and everything that training needs is at hand.

    model, flat: shared by the sites of one process; they hold this site's start until another turn opens.
    indices: (n,) of the samples, exemplars last. mechanism: of the update. teacher: frozen model of the task
    before, or None if no term needs it. methods: the site halves that the experiment names. neighbours:
    measures for Bayesian accounting how far one record more would move the update. start: the tensors that
    the model holds, as they were received.
    """

    site: Site
    request: TrainRequest
    model: IncrementalModel
    flat: FlatParameters
    data: TrainingSet
    indices: Tensor
    mechanism: Mechanism
    teacher: IncrementalModel | None
    methods: SiteMethods
    neighbours: "NeighbourDistances | None"
    adversary: AdversaryKind | None
    start: Mapping[str, Tensor]

    @classmethod
    def open(cls, site: Site, request: TrainRequest, beside: "TrainingTurn | None" = None) -> "TrainingTurn":
        """Check the request and gather what training needs; the model holds what was received.

        beside: the turn before this one, of another simulated site, open on the same request: what follows
        from the request alone is that turn's. Raises a PerennialError that says what is wrong.
        """
        check_answer(site.identity.policy, "train")
        methods, state = SiteMethods.of(site.experiment), site.state(request.run)
        start = {"site": site.name, "seed": site.experiment.seed, "request": request, "records": state}
        methods.begin(TurnStart(**start))
        check_update(site.identity.policy, site.experiment, **methods.claim)
        if (names := parse_measurements(request.settings)) and site.experiment.privacy.enabled:
            raise PrivacyError(f"{', '.join(names)}: no accountant covers them; allowed without privacy")
        if beside is None:
            site.check_experiment(request)
        previous = site.load_previous_model(request)
        arrays = methods.receive(request.arrays)
        if beside is None or arrays is not request.arrays:
            model, flat = site.models.load(request.num_classes, arrays, previous)
        else:
            arrays, model, flat = beside.start, beside.model, beside.flat
        models = site.models
        methods.open(
            LocalTurn(
                **start,
                learner=site.experiment.learner,
                flat=flat,
                input_shape=models.input_shape,
                device=models.device,
            )
        )
        old = torch.empty(0, dtype=torch.int64)

        def find() -> Tensor:
            nonlocal old
            rows, exemplars = methods.choose(*find_training_indices(site, request, previous))
            old = rows[len(rows) - exemplars :]
            if not hides_count(site.identity):
                check_floor(site.identity.policy, "update", len(rows))
            return rows

        mechanism = charges.price_update(site.experiment, request.run)
        indices = choose(site, mechanism, find)
        exemplars = int(torch.isin(indices, old).sum()) if len(old) else 0
        adversary = _find_adversary(site)
        data = site.samples(indices, exemplars=exemplars)
        if adversary == "label_flip":
            data = flip_labels(data, request.num_classes, site.experiment.seed, site.name)
        teacher = (
            site.models.load_teacher(previous)
            if previous and site.experiment.learner.needs_previous
            else None
        )
        opened = cls(
            site=site,
            request=request,
            model=model,
            flat=flat,
            data=data,
            indices=indices,
            mechanism=mechanism,
            teacher=teacher,
            methods=methods,
            neighbours=_build_neighbours(site, request) if site.experiment.privacy.enabled else None,
            adversary=adversary,
            start=arrays,
        )
        return opened

    def resume(self, vector: Tensor) -> None:
        """Load this turn's parameters, vector (P,), into the shared model again, after other turns."""
        self.flat.vector.copy_(vector)

    def train_and_reply(self) -> TrainReply:
        """Train this site alone and return its reply. No other turn may have been opened since this one."""
        return self.reply(self._train())

    def released(self) -> dict[str, Typed]:
        """Train this site alone and return the fields of its reply, of which nothing is charged yet."""
        result = self._train()
        typed = self._build_fields(result)
        self._close(result)
        return typed

    def _close(self, result: TrainingResult) -> None:
        """Let the methods see the update as it leaves; a copy, which they cannot change, if private."""
        if not self.site.experiment.privacy.enabled:
            self.methods.close(result.update, result.steps)
            return
        with contain_errors("what a method keeps"):
            self.methods.close(result.update.clone(), result.steps)

    def as_member(self, start: Tensor) -> "Member | None":
        """This site's part in a cohort's training; None if it must train alone. start: (P,), as received.

        DP-SGD clips samples and not batches, and a Bayesian estimate trains on halves too.
        """
        private = self.site.experiment.privacy.mode == "sample"
        if self.neighbours is not None or private or self.methods.one_site_alone:
            return None
        from perennial.learning.cohort_training import Member

        return Member(self.data, start, self._batches(), self.methods.correction, self.methods.extra)

    def _train(self) -> TrainingResult:
        """Train the model in place, by the learner that the experiment names and under its privacy mode."""
        mode = self.site.experiment.privacy.mode
        few = len(self.data) < find_fewest_samples(self.model)
        if few and mode != "sample" and hides_count(self.site.identity):
            # a refusal would tell of one sample
            return TrainingResult(torch.zeros_like(self.flat.vector), 0.0, 0)
        with explain_stale_tensors(self.methods.methods, self.flat.shapes):
            if mode == "sample":
                return self._train_by_private_steps()
            if self.neighbours is not None:
                self.neighbours.see_halves(self.data, self.flat, self.methods.stays, self._train_by_epochs)
            return self._train_by_epochs(self.data, self._batches())

    def _batches(self) -> np.random.Generator:
        ids = self.request.round, *self.methods.batch_ids
        return stream(self.site.experiment.seed, "batches", self.site.name, *ids)

    def _build_settings(self) -> dict[str, Any]:
        """What training by epochs and by private steps both take."""
        return {
            "teacher": self.teacher,
            "augmentation": self.site.experiment.data.augmentation,
            "progress": self.progress,
            "first_class": self.site.find_task_range(self.request).start,
            "correction": self.methods.correction,
            "extra": self.methods.extra,
            "terms": self.methods.terms,
        }

    @property
    def progress(self) -> float:
        """Share of this task's rounds that are done, for a learning-rate schedule."""
        experiment, rounds, task = (
            self.site.experiment,
            self.site.process.registry.schedule.rounds,
            self.request.task,
        )
        before = sum(
            experiment.lead_rounds(i) + rounds[i - 1] for i in range(1, task)
        ) + experiment.lead_rounds(task)
        return max(0, self.request.round - 1 - before) / rounds[task - 1]

    def _train_by_private_steps(self) -> TrainingResult:
        from perennial.learning.private_training import train_privately

        experiment = self.site.experiment
        return train_privately(
            experiment.learner,
            experiment.privacy,
            self.model,
            self.flat,
            self.data,
            Noise(),
            neighbours=self.neighbours,
            **self._build_settings(),
        )

    def _train_by_epochs(self, samples: TrainingSet, generator: np.random.Generator) -> TrainingResult:
        return train(
            self.site.experiment.learner,
            self.model,
            self.flat,
            samples,
            generator,
            steps=self.site.steps(),
            start=self.start,
            **self._build_settings(),
        )

    def reply(self, result: TrainingResult) -> TrainReply:
        """Protect the update and let it leave. The shared model must be as trained."""
        reply = leave(self.site.identity, self.request, TrainReply, **self._build_fields(result))
        self._close(result)
        return reply

    def _build_fields(self, result: TrainingResult) -> dict[str, Typed]:
        """The fields of the reply: the update as it may leave, and what belongs to it."""
        site, request, flat, stays = self.site, self.request, self.flat, set(self.methods.stays)
        # what stays here must not take its share of the clip norm from what leaves
        self.methods.finish(flat, result.update)
        if self.adversary == "free_rider":
            result.update.zero_()
        if self.neighbours is not None:
            self.neighbours.keep()
        privacy = site.experiment.privacy
        protect(site, self.mechanism, result)

        update = flat.view_tensors(result.update)
        lends = site.experiment.digests is None or "digest" in site.identity.policy.answers

        def release_value(value: Any) -> Released[Any]:
            return Released(value, self.mechanism)

        typed: dict[str, Typed] = {
            "update": release_value(
                Tensors({n: t.contiguous() for n, t in update.items() if n not in stays})
            ),
            "lends_digests": Public(lends),
        }
        asks = request.settings != "{}"
        metrics = measure_training(site, request, self.model, self.indices, result) if asks else {}
        if privacy.enabled:
            # steps follow the number of samples, except in mode sample, where they are public
            steps = (self.mechanism.entry.steps or 0) if privacy.mode == "sample" else 0
            return {**typed, "num_examples": Public(1), "steps": Public(steps)}
        return typed | {
            "num_examples": release_value(len(self.indices)),
            "train_loss": release_value(result.require_finite_loss()),
            "steps": release_value(result.steps),
            "metrics": release_value(json.dumps(metrics)),
        }


def protect(site: Site, mechanism: Mechanism, result: TrainingResult) -> None:
    """Clip and noise an update in place, as the mechanism says.

    Under client_central the server adds the noise, and under client_shared the site's share of it comes on
    the grid (client/secure_values.py). An update that is not finite counts as zero. Raises PrivacyError where
    training took other steps than the mechanism is charged for.
    """
    privacy = site.experiment.privacy
    if privacy.mode == "sample" and result.steps != mechanism.entry.steps:
        raise PrivacyError(f"DP-SGD took {result.steps} steps; {mechanism.entry.steps} are charged")
    if privacy.mode not in ("client_local", "client_central", "client_shared"):
        return
    assert privacy.clip_norm is not None
    std = mechanism.std if privacy.mode == "client_local" else 0.0
    protect_update(result.update, privacy.clip_norm, std, Noise())


def _build_neighbours(site: Site, request: TrainRequest) -> "NeighbourDistances | None":
    from perennial.learning.bayesian_estimate import NeighbourDistances

    experiment, tasks = site.experiment, enumerate(site.process.registry.schedule.rounds, 1)
    rounds = sum(experiment.lead_rounds(task) + rounds for task, rounds in tasks)
    state_dir = site.identity.state_dir
    return NeighbourDistances.of(experiment, rounds, state_dir, site.name, request.run, request.round)


def _find_adversary(site: Site) -> AdversaryKind | None:
    """How a simulated site cheats, which a method that values contributions has to detect.

    A deployed site never does any of this, whatever the experiment says.
    """
    if site.identity.deployed:
        return None
    return next((a.kind for a in site.experiment.adversaries if a.site == site.name), None)


def flip_labels(data: TrainingSet, num_classes: int, seed: int, site: str) -> TrainingSet:
    """data with every label replaced by another class, the same one for all samples of a class."""
    cycle = torch.from_numpy(stream(seed, "label-flip", site, num_classes).permutation(num_classes))
    wrong = torch.empty_like(cycle)
    wrong[cycle] = cycle.roll(1)
    return replace(data, y=wrong.to(data.y.device)[data.y])
