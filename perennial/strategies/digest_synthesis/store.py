"""The digests that the server keeps, by site and task: checked when they come in, padded as classes arrive.

Symbols: D digests, M classes known when they were made.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.foundation.errors import ProtocolError
from perennial.privacy.config import DigestConfig
from perennial.protocol.messages import DigestReply

SIMPLEX_TOLERANCE = 1e-4


@dataclass(frozen=True)
class StoredDigests:
    """The digests that one site lent in one task. features: (D, ...) float32; labels: (D, M) float32.

    samples: number of samples mixed into them. class_order, encoder: hashes with which alone they are valid.
    """

    features: Tensor
    labels: Tensor
    samples: int
    class_order: str
    encoder: str

    def pad_labels(self, num_classes: int) -> Tensor:
        """(D, num_classes) labels: classes that came later have share 0."""
        return F.pad(self.labels, (0, num_classes - self.labels.shape[1]))


def check_digest_reply(
    reply: DigestReply, encoder: str, shape: tuple[int, ...], per_digest: int
) -> StoredDigests:
    """The digests in a reply. Raises ProtocolError naming what is wrong: a site may send anything.

    encoder: hash of the server's. shape: of one digest. The stamp has been compared before.
    """
    if reply.encoder != encoder:
        raise ProtocolError(f"DigestReply: encoder: found {reply.encoder:.12}, expected {encoder:.12}")
    if reply.samples_per_digest != per_digest:
        raise ProtocolError(
            f"DigestReply: samples_per_digest: found {reply.samples_per_digest}, expected {per_digest}"
        )
    if reply.digests is None or reply.digests.keys() != {"features", "labels"}:
        found = sorted(reply.digests or {})
        raise ProtocolError(f"DigestReply: digests: found {found}, allowed features and labels")
    features, labels = reply.digests["features"], reply.digests["labels"]
    count = len(features) if features.dim() else 0
    expected = {"features": (count, *shape), "labels": (count, reply.num_classes)}
    for name, tensor in (("features", features), ("labels", labels)):
        if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
            raise ProtocolError(
                f"DigestReply: {name}: found {tensor.dtype} {tuple(tensor.shape)}, "
                f"expected torch.float32 {expected[name]}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ProtocolError(f"DigestReply: {name}: holds values that are not finite")
    if count == 0:
        raise ProtocolError("DigestReply: features: found no digest, allowed 1 or more")
    off = (labels.sum(dim=1) - 1).abs().max()
    if bool((labels < 0).any()) or float(off) > SIMPLEX_TOLERANCE:
        raise ProtocolError("DigestReply: labels: a row is negative or does not sum to 1")
    samples = count * per_digest
    return StoredDigests(features.clone(), labels.clone(), samples, reply.class_order, reply.encoder)


@dataclass
class DigestStore:
    """The digests of all sites: site -> task -> digests."""

    _held: dict[str, dict[int, StoredDigests]] = field(default_factory=dict)

    def put(self, site: str, task: int, digests: StoredDigests) -> None:
        """Keep a site's digests of one task.

        Raises ProtocolError for a second release of the same task, which would cost the site twice.
        """
        tasks = self._held.setdefault(site, {})
        if task in tasks:
            raise ProtocolError(f"DigestReply: site {site!r} has lent digests of task {task} already")
        tasks[task] = digests

    def drop(self, site: str) -> int:
        """Forget all of a site's digests; returns how many."""
        return sum(len(digests.features) for digests in self._held.pop(site, {}).values())

    @property
    def sites(self) -> list[str]:
        """Sites with digests, in order of name."""
        return sorted(self._held)

    def holds(self, site: str, task: int) -> bool:
        return task in self._held.get(site, {})

    def list_digests(self, site: str) -> dict[int, StoredDigests]:
        """A site's digests by task."""
        return dict(sorted(self._held.get(site, {}).items()))

    def samples(self, site: str) -> int:
        """Number of samples in a site's digests."""
        return sum(digests.samples for digests in self.list_digests(site).values())

    def gathered(
        self,
        sites: list[str],
        num_classes: int,
        spread_by: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Join sites' digests, by name and task: (features (D, ...), labels (D, num_classes)).

        spread_by: multiplies each single-class digest's distance from its class's mean.
        """
        parts = [digests for site in sorted(sites) for digests in self.list_digests(site).values()]
        features = [
            part.features if spread_by == 1 else spread(part.features, part.labels, spread_by)
            for part in parts
        ]
        labels = [part.pad_labels(num_classes) for part in parts]
        return torch.cat(features), torch.cat(labels)

    def find_missing_classes(self) -> list[int]:
        """Indices of known classes that have no share in any digest."""
        rows = [digests.labels for site in self.sites for digests in self.list_digests(site).values()]
        known = max((labels.shape[1] for labels in rows), default=0)
        held = sum(
            (F.pad(labels.sum(dim=0), (0, known - labels.shape[1])) for labels in rows), torch.zeros(known)
        )
        return (held == 0).nonzero().flatten().tolist()

    def bytes(self, site: str) -> int:
        """Bytes of a site's digests as it sent them, tensors alone."""
        return sum(
            4 * (part.features.numel() + part.labels.numel()) for part in self.list_digests(site).values()
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and JSON-able facts by name; keys number the sites, whose names may hold any character."""
        state: dict[str, Any] = {}
        facts = []
        for site in self.sites:
            for task, digests in self.list_digests(site).items():
                key = f"digest/{len(facts)}"
                state[f"{key}/features"], state[f"{key}/labels"] = digests.features, digests.labels
                facts.append([site, task, digests.samples, digests.class_order, digests.encoder])
        return state | {"digests": facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = {}
        for number, (site, task, samples, class_order, encoder) in enumerate(state["digests"]):
            features, labels = (state[f"digest/{number}/{part}"] for part in ("features", "labels"))
            self.put(site, task, StoredDigests(features, labels, samples, class_order, encoder))


PURE = 1 - 1e-6
"""A digest with at least this share of one class is of that class alone."""


def spread_factor(config: DigestConfig) -> float:
    """sqrt(S): how much further from their class's mean samples lie than digests."""
    return (1 / config.per_digest) ** -0.5


def spread(features: Tensor, labels: Tensor, factor: float) -> Tensor:
    """Move digests of a single class away from their class's mean, to `factor` times the distance.

    features: (D, ...) of one site. labels: (D, M). Returns (D, ...), never below 0, as features are; digests
    of several classes stay as they are.
    """
    share, label = labels.max(dim=1)
    one_hot = torch.nn.functional.one_hot(label, labels.shape[1]).to(features.dtype)
    one_hot = one_hot * (share >= PURE).unsqueeze(1)
    rows = features.flatten(1)
    means = one_hot.T @ rows / one_hot.sum(dim=0).clamp_min(1).unsqueeze(1)
    moved = (means[label] + factor * (rows - means[label])).clamp_min(0)
    return torch.where((share >= PURE).unsqueeze(1), moved, rows).view_as(features)
