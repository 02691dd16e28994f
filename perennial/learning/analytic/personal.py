"""A site's own head, which begins at the federated one: W = argmin own loss + lambda |W - W_all|^2.

Nothing of other sites is needed but the federated head. lambda is chosen by validation records that neither
head was solved from: infinite is the federated head with the site's own class frequencies, 0 is the site's
own ridge head, so that taking part costs a site nothing but what few validation records mistake.

Shapes: n records, D features, C classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perennial.learning.analytic.solve import LEAST_VARIANCE, LinearHead
from perennial.models.class_means import NEVER

PENALTIES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Values of lambda between own and federated, in units of the mean squared feature's sum over the records."""
OWN_PENALTIES = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Shrinkages towards 0 of the site's own head, among which generalised cross-validation chooses."""
LEAST_RECORDS = 10
"""Validation records below which the federated head stays, with the site's own frequencies."""
OWN, FEDERATED = 0.0, math.inf


@dataclass(frozen=True)
class PersonalHead:
    """What a site's records make of the federated head.

    own: the site's own head. personal: the chosen one. penalty: its lambda. errors: lambda -> mean squared
    error of class indicators on the validation records. missing: labels of which the site has no record.
    """

    own: LinearHead
    personal: LinearHead
    penalty: float
    errors: dict[float, float]
    missing: list[int]


def fit_personal_head(
    federated: LinearHead, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> PersonalHead:
    """Fit a site's own head and its personal one. train, validation: (features (n, D), labels (n,))."""
    features, labels = train[0].double(), train[1]
    classes = len(federated.bias)
    counts = torch.bincount(labels, minlength=classes)
    known, held = federated.bias > NEVER / 2, counts > 0
    targets = torch.nn.functional.one_hot(labels, classes).double()
    frequency = (counts + 1.0) / (len(labels) + classes)
    mean, deviation = features.mean(dim=0), features.var(dim=0, correction=0)
    deviation = torch.where(deviation > LEAST_VARIANCE, deviation.clamp(min=0).sqrt(), torch.inf)
    left, values, right = _decompose((features - mean) / deviation)
    unit = float(values.square().sum()) / features.shape[1]

    def solve_weights(residual: Tensor, penalty: float) -> Tensor:
        """(C, D) weights on the features as they are."""
        shrunk = values / (values.square() + penalty * unit)
        return (right.T @ (shrunk[:, None] * (left.T @ residual))).T / deviation

    centred = targets - targets.mean(dim=0)
    weight = solve_weights(centred, _choose_by_gcv(left, values, centred, unit))
    own = _complete(weight, frequency - weight @ mean, held & known)
    scores = features @ federated.weight.T
    varying = scores - scores.mean(dim=0)
    seen = held & known
    gain = float(
        (varying[:, seen] * centred[:, seen]).sum() / varying[:, seen].square().sum().clamp(min=1e-12)
    )
    base = max(gain, 0.0) * federated.weight
    offset = frequency - base @ mean
    # a class without records here keeps its row and what the federated head says of its frequency
    offset = torch.where(held, offset, max(gain, 0.0) * federated.bias + (1 - max(gain, 0.0)) / classes)
    residual = targets - features @ base.T - offset
    residual[:, ~held] = 0
    heads = {FEDERATED: _complete(base, offset, known)}
    for penalty in PENALTIES:
        more = solve_weights(residual - residual.mean(dim=0), penalty)
        heads[penalty] = _complete(base + more, offset - more @ mean, known)
    heads[OWN] = own
    errors = {penalty: _measure_error(head, *validation, held) for penalty, head in heads.items()}
    enough = len(validation[1]) >= LEAST_RECORDS and bool(varying.any())
    # of equals the one that is nearest to the federated head
    penalty = min(errors, key=lambda each: (errors[each], -each)) if enough else FEDERATED
    missing = torch.nonzero(~held & known).flatten().tolist()
    chosen = _replace_rows(heads[penalty], heads[FEDERATED], missing) if penalty == OWN else heads[penalty]
    return PersonalHead(own, chosen, penalty, errors, missing)


def _decompose(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(U (n, r), singular values (r,), V^T (r, D)) of (n, D), by the smaller matrix of products."""
    wide = len(rows) < rows.shape[1]
    squares, vectors = torch.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    kept = squares > 1e-10 * squares[-1].clamp(min=1e-300)
    values, vectors = squares[kept].sqrt(), vectors[:, kept]
    if wide:
        return vectors, values, (vectors.T @ rows) / values[:, None]
    return rows @ vectors / values, values, vectors.T


def _replace_rows(head: LinearHead, other: LinearHead, labels: list[int]) -> LinearHead:
    weight, bias = head.weight.clone(), head.bias.clone()
    weight[labels], bias[labels] = other.weight[labels], other.bias[labels]
    return LinearHead(weight, bias)


def _complete(weight: Tensor, bias: Tensor, known: Tensor) -> LinearHead:
    weight = torch.where(known[:, None], weight, torch.zeros_like(weight))
    return LinearHead(weight, torch.where(known, bias, torch.full_like(bias, NEVER)))


def _measure_error(head: LinearHead, features: Tensor, labels: Tensor, held: Tensor) -> float:
    """Mean squared error of the indicators of classes that the site has."""
    if not len(labels):
        return 0.0
    targets = torch.nn.functional.one_hot(labels, len(held)).double()
    wrong = (head.scores(features) - targets)[:, held]
    return float(wrong[:, (head.bias > NEVER / 2)[held]].square().sum(dim=1).mean())


def _choose_by_gcv(left: Tensor, values: Tensor, targets: Tensor, unit: float) -> float:
    """The shrinkage that generalised cross-validation prefers (Golub, Heath and Wahba 1979)."""
    records, inside = len(targets), left.T @ targets
    outside = float(targets.square().sum() - inside.square().sum())
    scores = []
    for penalty in OWN_PENALTIES:
        kept = values.square() / (values.square() + penalty * unit)
        rss = outside + float(((1 - kept)[:, None] * inside).square().sum())
        scores.append(rss / max(1 - (1 + float(kept.sum())) / records, 1e-3) ** 2)
    return min(zip(scores, OWN_PENALTIES, strict=True))[1]
