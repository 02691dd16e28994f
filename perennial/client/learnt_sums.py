"""A site's part of a Gaussian head over features that were learnt: exact sums at the end of a task.

While the network trains, its features change, so that earlier classes are known by their exemplars. Once it
trains no more (freeze_after), sums stay right: a site adds each later task's to those that it kept.
"""

import torch
from torch import Tensor

from perennial.client.policy import check_answer, check_floor, check_statistics, withheld
from perennial.client.site import Site
from perennial.config import charges
from perennial.foundation.errors import ProtocolError
from perennial.learning.analytic.statistics import Collector, Statistics
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.models.feature_maps.ball import content_of, on_grid
from perennial.models.incremental import IncrementalModel
from perennial.privacy.released import Released
from perennial.protocol.messages import FinishTaskRequest
from perennial.protocol.tensors import Tensors

RECORD = "learnt-sums"
"""Sums since the network trains no more, as they are after a task, under the round that ended it."""


def check_learnt_sums(site: Site) -> None:
    """Raises PolicyRefusal where sums of features may not leave."""
    check_answer(site.identity.policy, "statistics")
    check_statistics(site.identity.policy, site.experiment)


def released_learnt_sums(
    site: Site, request: FinishTaskRequest, model: IncrementalModel
) -> Released[Tensors]:
    """Sums of features of the task's samples and of samples of earlier classes.

    Of earlier classes the exemplars count, or all of the site's samples once the network trains no more.
    Classes below the policy's floor are left out. Raises PolicyRefusal if sums may not leave, or all classes
    are below the floor.
    """
    check_learnt_sums(site)
    if site.experiment.learner.trains_in(request.task + 1):
        found = _shown_sums(site, model, _rows(site, request))
    else:
        found = _with_kept(site, request, model)
    return Released(as_tensors(found), charges.in_the_clear(site.experiment, request.run, "statistics"))


def as_tensors(sums: Statistics) -> Tensors:
    """The sums as named tensors, as they are sent and stored."""
    return Tensors(gram=sums.gram, sums=sums.sums, counts=sums.counts)


def _with_kept(site: Site, request: FinishTaskRequest, model: IncrementalModel) -> Statistics:
    """Sums over the samples of all tasks so far: those that were kept, and of the tasks since.

    Raises ProtocolError when they were kept over the features of another network.
    """
    state, network = site.state(request.run), content_of([("", model.backbone.state_dict())])
    kept = state.get(RECORD, before=request.round)
    known, classes = 0, range(model.num_classes)
    if kept is not None:
        _, facts = kept
        if facts["network"] != network:
            raise ProtocolError(
                "FinishTaskRequest: arrays: the network is not the one whose features this site has summed "
                f"since task {site.experiment.learner.freeze_after}; allowed: a network that trains no more"
            )
        known = int(facts["classes"])
    found = _shown_sums(site, model, site.data.task_indices("train", known, classes.stop))
    if kept is not None:
        tensors, _ = kept
        found += Statistics(tensors["gram"], tensors["sums"], tensors["counts"], range(known))
    facts = {"network": network, "classes": classes.stop}
    state.put(RECORD, request.round, as_tensors(found), facts)
    return found


def _shown_sums(site: Site, model: IncrementalModel, rows: Tensor) -> Statistics:
    """Sums over those of the samples at rows whose classes may leave."""
    samples, policy = site.samples(rows), site.identity.policy
    counts = samples.counts(model.num_classes).cpu()
    stay = withheld(policy, "statistics", counts.tolist())
    if len(stay) == len(counts):
        check_floor(policy, "statistics", 0)
    shown = ~torch.isin(samples.y, torch.tensor(sorted(stay), dtype=torch.int64, device=samples.y.device))
    return _collected(model, samples, shown.nonzero().flatten())


def _rows(site: Site, request: FinishTaskRequest) -> Tensor:
    """Indices of the task's training samples, and of the exemplars of the classes before."""
    new = site.task_range(request)
    kept = site.exemplars(request.run).indices(before_round=request.round + 1)
    earlier = kept[site.data.y[kept] < new.start]
    return torch.cat([site.data.task_indices("train", new.start, new.stop), earlier])


@torch.no_grad()
def _collected(model: IncrementalModel, samples: TrainingSet, rows: Tensor) -> Statistics:
    model.eval()
    collector = Collector(model.feature_width, range(model.num_classes), device=samples.x.device)
    for part in rows.split(EVALUATION_BATCH):
        collector.add(on_grid(model.features(samples.inputs(part))), samples.y[part])
    return collector.finish()
