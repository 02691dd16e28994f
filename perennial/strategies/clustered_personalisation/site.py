"""The site halves of personalisation: layers that stay at the site, and sparsity vectors.

Personal layers are trained here, kept on the site's disk, and never part of a message. FedPer (Arivazhagan et
al. 2019, arXiv 1912.00818).

A sparsity vector is a statistic of the site's data. Nothing is proven about what it gives away unless it has
noise; then one Gaussian release hides the replacement of one sample (FedPerC's authors leave this open).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from perennial.client.held_out import count_held_out, own_class_means
from perennial.client.policy import check_answer, check_floor, check_sparsity, protects_records
from perennial.client.release import contain_errors, leave
from perennial.client.site import Site
from perennial.client.training_samples import choose, find_training_indices
from perennial.config import charges
from perennial.config.evaluation import count_noise
from perennial.config.strategies import list_nested
from perennial.foundation.errors import PolicyRefusal, ProtocolError, StateError
from perennial.learning.batches import split_batches
from perennial.learning.site_method import (
    Answers,
    PlannedRun,
    Records,
    SiteMethod,
    TurnStart,
    read_settings_part,
)
from perennial.models.layers import append_rows, select_layers
from perennial.models.sparsity import VECTOR, VectorSettings, zero_shares
from perennial.privacy.accountants import compute_sparsity_l2_sensitivity
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.released import Public, Released
from perennial.protocol.messages import (
    PersonalModelReply,
    PersonalModelRequest,
    SparsityReply,
    SparsityRequest,
    TrainRequest,
)
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors, hash_tensors

RECORD = "own-layers"
USUAL_PERSONAL = ("head",)
"""Where an experiment names no layers."""
PERSONAL = "personal"
"""The key of a request's settings that names the layers that stay; rounds of a global model have none."""


def answer_personal_model(site: Site, request: PersonalModelRequest) -> PersonalModelReply:
    """Keep the site's personalised model on its disk; reply with its right answers if sites evaluate."""
    policy = site.identity.policy
    check_answer(policy, "train")
    site.check_experiment(request)
    previous = site.load_previous_model(request)
    records, names = site.state(request.run), request.personal or []
    arrays = restore_own_layers(records, site.name, request.arrays, names, before_round=request.round + 1)
    model, _ = site.models.load(request.num_classes, arrays, previous)
    experiment = site.experiment
    # noise that the server adds to sums is on no single site's counts
    on_sums_alone = experiment.privacy.mode == "client_central" and count_noise(experiment) is not None
    if not experiment.evaluation.federated or "evaluate" not in policy.answers or on_sums_alone:
        reply = leave(site.identity, request, PersonalModelReply)
    else:
        counts = count_held_out(site, request, model)
        reply = leave(site.identity, request, PersonalModelReply, **counts.build_fields())
    with contain_errors("the site's own model") if protects_records(site.identity) else nullcontext():
        site.keep_own_model(model, own_class_means(site, request, model))
    return reply


def restore_own_layers(
    records: Records, site: str, arrays: Mapping[str, Tensor], names: Sequence[str], before_round: int
) -> Tensors:
    """arrays, with the site's own values for the named layers as they were before a round.

    A site without values of its own starts from those received; a classifier that has grown since keeps its
    own rows and takes the new ones from those received. Raises ProtocolError when a name is not in arrays,
    StateError when the kept layer is of another network.
    """
    unknown = sorted(set(names) - arrays.keys())
    if unknown:
        raise ProtocolError(f"personal: found {unknown[0]!r}, which is no tensor of the model received")
    record = records.get(RECORD, before_round)
    own = record[0] if record is not None else {}
    joined = Tensors(arrays)
    for name in names:
        if name in own:
            try:
                joined[name] = append_rows(own[name], arrays[name])
            except ValueError as error:
                raise StateError(f"own layer {name!r} of site {site!r}: {error}") from error
    return joined


class PersonalSite(SiteMethod):
    """The site half of FedPer: the named layers are the site's own, from one round to the next."""

    answers: ClassVar[Answers] = {PersonalModelRequest: answer_personal_model}
    usual: ClassVar[tuple[str, ...]] = USUAL_PERSONAL

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        often = plan.experiment.evaluation.every == "round"
        return int(kind == "personal_model" and (often or number in plan.last_rounds))

    def extra_questions(self, plan: PlannedRun) -> tuple[int, int]:
        numbers = range(1, plan.last_rounds[-1] + 1)
        asked = sum(self.extra_requests("personal_model", number, plan) for number in numbers)
        return (asked, asked) if plan.experiment.evaluation.federated else (0, 0)

    def check(self, request: Stamp, plan: PlannedRun) -> None:
        """Check which layers stay. Raises PolicyRefusal if they are not those of the experiment's round."""
        if isinstance(request, TrainRequest):
            named = read_settings_part(request, PERSONAL, list[str]) or []
        elif isinstance(request, PersonalModelRequest):
            named = request.personal or []
        else:
            return
        stay = select_layers(self._patterns, request.arrays) if self._is_personal(request.round, plan) else ()
        if sorted(named) != sorted(stay):
            raise PolicyRefusal(
                f"personal: found {sorted(named)}, in round {request.round} of the approved experiment "
                f"{sorted(stay)}"
            )

    @property
    def _patterns(self) -> Sequence[str]:
        return self.keys.get("personal", self.usual)

    def _is_personal(self, number: int, plan: PlannedRun) -> bool:
        """Whether a round is after those in which all sites train one global model."""
        past = [last for last in plan.last_rounds if last < number]
        task = len(past) + 1
        rounds = self.keys.get("global_rounds", 0)
        if not isinstance(rounds, int):
            if task > len(rounds):
                raise PolicyRefusal(f"global_rounds: the approved experiment has no number for task {task}")
            rounds = rounds[task - 1]
        return number - max(past, default=0) - plan.experiment.lead_rounds(task) > rounds

    def begin(self, start: TurnStart) -> None:
        self.start = start
        self.stays = tuple(start.read_settings(PERSONAL, list[str]) or ())

    def receive(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        start = self.start
        if not self.stays:
            return arrays
        return restore_own_layers(start.records, start.site, arrays, self.stays, start.request.round)

    def finish(self, trained: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> None:
        if self.stays:
            own = {name: trained[name] for name in self.stays}
            self.start.records.put(RECORD, self.start.request.round, own, {})
        for name in self.stays:
            update[name].zero_()

    def owns_model(self, records: Records, before: int) -> bool:
        return records.get(RECORD, before) is not None


def answer_sparsity(site: Site, request: SparsityRequest) -> SparsityReply:
    """The mean share of zeros of the experiment's channels, over the samples that this task is trained on.

    With the experiment's sparsity_epsilon, exemplars of earlier tasks are left out, and the sum over the
    samples and their number get noise together, so that neither value nor scale of the noise tells it.
    Raises PolicyRefusal when the policy lets no such vector leave or the samples are too few, PrivacyError
    when the budget does not cover it.
    """
    policy, settings = site.identity.policy, _read_settings(site)
    check_answer(policy, "sparsity")
    check_sparsity(policy, site.experiment, noised=settings.epsilon is not None)
    site.check_experiment(request)
    previous = site.load_previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    plan = settings.plan(model.eval(), site.models.input_shape, site.experiment.seed)
    mechanism = charges.price_sparsity(site.experiment, request.run, settings.epsilon)

    def find() -> Tensor:
        if settings.epsilon is not None:
            classes = site.find_task_range(request)
            # all of them: which samples pre-training leaves depends on the others
            return site.data.find_task_indices("train", classes.start, classes.stop)
        rows, _ = find_training_indices(site, request, previous)
        check_floor(policy, "sparsity", len(rows))
        return rows

    rows = choose(site, mechanism, find)
    samples = len(rows)
    data = site.samples(rows, hidden=settings.epsilon is not None)
    vector = torch.zeros(plan.length, dtype=torch.float64)
    if samples or settings.epsilon is None:
        vector = plan.vector(zero_shares(model, split_batches(data), plan.layers))
    if settings.epsilon is not None:
        mechanism = mechanism.within(compute_sparsity_l2_sensitivity(plan.length))
        sums = torch.cat([vector * samples, torch.tensor([samples], dtype=torch.float64)])
        add_noise(sums, mechanism.std, Noise())
        vector = (sums[:-1] / sums[-1].clamp(min=1.0)).clamp(0.0, 1.0)
    return leave(
        site.identity,
        request,
        SparsityReply,
        extractor=Public(plan.fingerprint(hash_tensors(request.arrays))),
        vector=Released(Tensors({VECTOR: vector.float()}), mechanism),
    )


def _read_settings(site: Site) -> VectorSettings:
    """Of the experiment's strategy, or one that it wraps."""
    section = site.experiment.strategy
    for name, keys in list_nested(section.name, section.parameters):
        if name in ("clustered_personalisation", "pfa"):
            return VectorSettings.of(keys)
    raise ProtocolError("SparsityRequest: the experiment's strategy finds no clusters")


class ClusteredSite(PersonalSite):
    """The site half of FedPerC: own layers, and a sparsity vector where groups are found by them."""

    answers: ClassVar[Answers] = {**PersonalSite.answers, SparsityRequest: answer_sparsity}

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        if kind == "sparsity":
            return int((self.keys.get("grouping") or "sparsity") in ("sparsity", "threshold"))
        return super().extra_requests(kind, number, plan)


class PFASite(ClusteredSite):
    """The site half of PFA, in which no layer stays."""

    usual: ClassVar[tuple[str, ...]] = ()
