"""A site's part of the global class means: for each class the sum of its exemplars' features.

A mean feature describes a class's samples at this site, so it is a release of its own: under client_local it
is clipped, noised and charged as an update is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.policy import check_floor, check_update, withheld
from perennial.client.record_sets import choose
from perennial.client.site import Site
from perennial.config import charges
from perennial.foundation.errors import PrivacyError
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import unit_features
from perennial.models.incremental import IncrementalModel
from perennial.privacy.noise import Noise
from perennial.privacy.protection import protect_update
from perennial.privacy.released import Released
from perennial.protocol.messages import FinishTaskRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors


@torch.no_grad()
def class_sums(model: IncrementalModel, exemplars: TrainingSet) -> Tensor:
    """(M, d) sums of the exemplars' features of unit length; a class without exemplars has a row of zeros."""
    sums = torch.zeros(model.num_classes, model.feature_width, device=exemplars.y.device)
    if len(exemplars):
        sums.index_add_(0, exemplars.y, unit_features(model, exemplars))
    return sums


def own_class_means(site: Site, request: Stamp, model: IncrementalModel) -> Tensor | None:
    """(M, d) unit means of the site's own exemplars after the request's round.

    A class without exemplars has a row of zeros. Returns None if the experiment classifies by the head, or if
    the site has no exemplar at all.
    """
    if site.experiment.learner.classifier != "nearest_mean":
        return None
    kept = site.exemplars(request.run).indices(before_round=request.round + 1)
    return F.normalize(class_sums(model, site.samples(kept)), dim=1) if len(kept) else None


def released_class_sums(
    site: Site, request: FinishTaskRequest, model: IncrementalModel, kept: Tensor
) -> Released[Tensors]:
    """Sums that may leave of the features of the exemplars at indices `kept`: "sums" (M, d), "counts" (M,).

    Both are 0 for classes that the policy's floor withholds. Under client_local every row is a mean direction
    instead, scaled so that all rows together have norm 1 at most. Replacing all of one site's data then moves
    the release by 2 at most, which is what the accountant assumes; the counts are 1 whatever the site holds.
    Raises PolicyRefusal when the site demands a protection that the experiment lacks or no class is above the
    floor, PrivacyError when the lifetime budget does not cover the release.
    """
    check_update(site.identity.policy, site.experiment)
    mechanism = charges.class_means(site.experiment, request.run)
    exemplars = site.samples(choose(site, mechanism, lambda: kept).rows)
    sums = class_sums(model, exemplars)
    privacy, identity = site.experiment.privacy, site.identity
    if privacy.mode == "none":
        counts = exemplars.counts(model.num_classes).to(torch.float32)
        stay = withheld(identity.policy, "class_means", [int(count) for count in counts.tolist()])
        if len(stay) == len(counts):
            check_floor(identity.policy, "class_means", 0)
        for label in stay:
            sums[label] = counts[label] = 0.0
    elif privacy.mode == "client_local":
        sums = F.normalize(sums, dim=1).div_(len(sums) ** 0.5)
        counts = torch.ones(len(sums), device=sums.device)
        protect_update(sums.view(-1), 1.0, mechanism.std, Noise())
    else:
        raise PrivacyError(f"learner.means global: not with privacy.mode {privacy.mode!r}")
    return Released(Tensors(sums=sums, counts=counts), mechanism)
