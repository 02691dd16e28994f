"""A site's part of a Gaussian head over features that were learnt: exact sums at the end of a task."""

import torch
from torch import Tensor

from perennial.client.floor import check_floor, withheld
from perennial.client.policy import check_answer, check_statistics
from perennial.client.release import charge_entry
from perennial.client.site import Site
from perennial.config import charges
from perennial.learning.analytic.statistics import Collector
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.models.feature_maps.ball import on_grid
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import FinishTaskRequest
from perennial.protocol.tensors import Tensors


def check_learnt_sums(site: Site) -> None:
    """Raises PolicyRefusal where sums of features may not leave."""
    check_answer(site.identity.policy, "statistics")
    check_statistics(site.identity.policy, site.experiment)


def release_learnt_sums(site: Site, request: FinishTaskRequest, model: IncrementalModel) -> Tensors:
    """Sums over the features of the task's samples and of the exemplars of earlier classes, charged.

    Classes below the policy's floor are in none of them. Raises PolicyRefusal where sums may not leave, or
    all classes are below the floor.
    """
    check_learnt_sums(site)
    policy = site.identity.policy
    samples = site.samples(_rows(site, request))
    counts = samples.counts(model.num_classes).cpu()
    stay = withheld(policy, "statistics", counts.tolist())
    if len(stay) == len(counts):
        check_floor(policy, "statistics", 0)
    shown = ~torch.isin(samples.y, torch.tensor(sorted(stay), dtype=torch.int64, device=samples.y.device))
    found = _collected(model, samples, shown.nonzero().flatten())
    if site.identity.deployed:
        charge_entry(site, charges.in_the_clear(site.experiment, request.run, "statistics"))
    return found


def _rows(site: Site, request: FinishTaskRequest) -> Tensor:
    """Indices of the task's training samples, and of the exemplars of the classes before."""
    new = site.task_range(request)
    kept = site.exemplars(request.run).indices(before_round=request.round + 1)
    earlier = kept[site.data.y[kept] < new.start]
    return torch.cat([site.data.task_indices("train", new.start, new.stop), earlier])


@torch.no_grad()
def _collected(model: IncrementalModel, samples: TrainingSet, rows: Tensor) -> Tensors:
    model.eval()
    collector = Collector(model.feature_width, range(model.num_classes))
    for part in rows.split(EVALUATION_BATCH):
        collector.add(on_grid(model.features(samples.inputs(part))), samples.y[part])
    sums = collector.finish()
    return Tensors(gram=sums.gram, sums=sums.sums, counts=sums.counts)
