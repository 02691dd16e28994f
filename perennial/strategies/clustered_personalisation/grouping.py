"""Decides which site belongs to which cluster, and when sites are clustered again."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config import charges
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.models.sparsity import VECTOR, SparsityPlan, VectorSettings
from perennial.protocol.messages import SparsityReply, SparsityRequest
from perennial.protocol.tensors import Tensors, hash_tensors
from perennial.strategies.clustered_personalisation.clustering import (
    Labels,
    cluster_at_random,
    cluster_by_k_means,
    cluster_by_threshold,
    compute_centres,
    find_nearest_centre,
    follow_majority,
    has_drifted,
    normalise_labels,
)
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.exchange import Exchange, ask
from perennial.strategies.round.request import RoundRequest

Rule = Literal["sparsity", "threshold", "random", "fixed"]


class Grouping:
    """Clusters of sites by one rule.

    labels: site -> cluster. vectors: the newest of each site that has been asked. truth: known groups. away:
    site -> the cluster that it would be in, of sites that were absent when clusters were found again.
    """

    def __init__(
        self,
        rule: Rule,
        clusters: int | Literal["auto"],
        groups: Sequence[Sequence[str]] | None,
        settings: VectorSettings,
    ) -> None:
        """Begin without clusters. Raises ValueError when rule, clusters and groups do not fit one another."""
        if clusters != "auto" and clusters < 1:
            raise ValueError(f"clusters: found {clusters}, allowed 1 or more, or auto")
        if rule == "random" and clusters == "auto":
            raise ValueError("clusters: found auto, but random groups need their number")
        if rule == "fixed" and groups is None:
            raise ValueError("groups: missing; grouping fixed needs lists of site names")
        members = [site for group in groups or [] for site in group]
        twice = sorted({site for site in members if members.count(site) > 1})
        if twice:
            raise ValueError(f"groups: {', '.join(twice)} listed more than once")
        self._rule: Rule = rule
        self._clusters: int | Literal["auto"] = clusters
        self._settings = settings
        self.truth: Labels = {site: index for index, group in enumerate(groups or []) for site in group}
        self.labels: Labels = {}
        self.away: Labels = {}
        self.vectors: dict[str, np.ndarray] = {}

    @property
    def needs_vectors(self) -> bool:
        """Whether sites are asked for sparsity vectors."""
        return self._rule in ("sparsity", "threshold")

    def list_members(self, cluster: int) -> frozenset[str]:
        """Sites of a cluster, absent ones too."""
        return frozenset(s for s, label in {**self.away, **self.labels}.items() if label == cluster)

    def group_by_cluster(self, sites: Sequence[str]) -> dict[int, list[str]]:
        """cluster -> those of these sites that are in it."""
        found: dict[int, list[str]] = {}
        for site in sites:
            found.setdefault(self.labels[site], []).append(site)
        return found

    def check_sites(self, sites: int | None) -> None:
        """Raise ConfigError if there are more clusters than sites. sites: None if nobody knows the number."""
        if self._clusters != "auto" and sites is not None and self._clusters > sites:
            raise ConfigError(f"strategy.clusters: found {self._clusters}, allowed 1 to {sites}, or auto")

    def assign(
        self,
        grid: Grid,
        exchange: Exchange,
        request: RoundRequest,
        services: RunContext,
        *,
        anew: bool,
        notes: list[str],
    ) -> None:
        """Give every site of the round a cluster if possible.

        anew: a personal phase begins; all sites are asked, and clusters are found again if there are none or
        if a site has drifted. Otherwise only sites without a cluster are asked, and join the nearest one.
        notes: gets a sentence for each site that stays without. Raises StateError when the vectors do not
        make so many clusters.
        """
        seed = services.experiment.seed
        if not self.needs_vectors:
            self._assign_without(sorted(request.sites), seed, notes)
            return
        asked = [site for site in request.sites if anew or site not in self.labels]
        if not asked:
            return
        found = self._ask(grid, exchange, request, services, asked, notes)
        if not found:
            return
        if anew and (not found.keys() & self.labels.keys() or self._has_moved(found)):
            by_distance = self._rule == "threshold"
            before = {**self.away, **self.labels}
            self.labels = (
                cluster_by_threshold(found)
                if by_distance
                else cluster_by_k_means(found, self._clusters, seed)
            )
            self.away = follow_majority(before, self.labels)
            self.vectors = found
            return
        if anew:
            # the extractor has changed, so only today's vectors say where the clusters lie now
            self.vectors = found
        of = compute_centres(self.vectors, self.labels)
        for site in sorted(found.keys() - self.labels.keys()):
            self.labels[site] = find_nearest_centre(found[site], of)
        self.vectors |= found

    def _has_moved(self, found: dict[str, np.ndarray]) -> bool:
        if self._clusters == "auto" and len(set(self.labels.values())) == 1:
            return True
        return has_drifted(self.vectors, found, compute_centres(self.vectors, self.labels))

    def _ask(
        self,
        grid: Grid,
        exchange: Exchange,
        request: RoundRequest,
        services: RunContext,
        asked: Sequence[str],
        notes: list[str],
    ) -> dict[str, np.ndarray]:
        settings = self._settings
        seed = services.experiment.seed
        plan = settings.plan(services.load(request.arrays), services.input_shape, seed)

        def note_drop(site: str, reason: str) -> None:
            notes.append(f"site {site}: no cluster: {reason}")

        if services.releases is not None:
            # one that refuses is counted too: its answer does not tell whether a vector had been charged
            charge = charges.price_sparsity(services.experiment, request.stamp.run, settings.epsilon).entry
            services.releases.asked(request.stamp.round, asked, [charge])
        return ask_vectors(grid, exchange, request, asked, plan, note_drop)

    def _assign_without(self, sites: Sequence[str], seed: int, notes: list[str]) -> None:
        if self._rule == "fixed":
            self.labels = normalise_labels(
                sorted(self.truth), np.array([self.truth[s] for s in sorted(self.truth)])
            )
            strangers = [site for site in sites if site not in self.labels]
            notes += [f"site {site}: no cluster: it is in none of strategy.groups" for site in strangers]
            return
        assert self._clusters != "auto"
        if not self.labels:
            if self._clusters > len(sites):
                raise StateError(
                    f"strategy.clusters: found {self._clusters}, but there are {len(sites)} sites"
                )
            self.labels = cluster_at_random(sites, self._clusters, seed)
        sizes = [list(self.labels.values()).count(cluster) for cluster in range(self._clusters)]
        for site in sites:
            if site not in self.labels:
                smallest = int(np.argmin(sizes))
                self.labels[site] = smallest
                sizes[smallest] += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs."""
        names = sorted(self.vectors)
        facts = {"labels": self.labels, "away": self.away}
        state: dict[str, Any] = {**facts, "names": names}
        if names:
            state["vectors"] = torch.from_numpy(np.stack([self.vectors[name] for name in names]))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels, self.away = state["labels"], state["away"]
        vectors: Tensor | None = state.get("vectors")
        rows = [] if vectors is None else list(vectors.double().cpu().numpy())
        self.vectors = dict(zip(state["names"], rows, strict=True))


def ask_vectors(
    grid: Grid,
    exchange: Exchange,
    request: RoundRequest,
    sites: Sequence[str],
    plan: SparsityPlan,
    dropped: Callable[[str, str], None],
) -> dict[str, np.ndarray]:
    """Ask sites for their sparsity vectors: site -> (plan.length,) float64, for valid replies.

    dropped: called with (site, reason) for each site that fails.
    """
    arrays = Tensors(request.arrays)
    messages: dict[str, SparsityRequest] = {}
    for some, fields in request.previous.group_fields(sites):
        messages |= dict.fromkeys(
            some, SparsityRequest(**request.stamp.stamp_fields, arrays=arrays, **fields)
        )
    fingerprint = plan.fingerprint(hash_tensors(arrays))
    replies = ask(
        grid,
        exchange,
        [(site, request.sites[site], messages[site]) for site in sites],
        SparsityReply,
        request.deadline,
        dropped,
        lambda reply: check_vector(reply, plan, fingerprint),
    )
    return {site: reply.vector[VECTOR].double().cpu().numpy() for site, reply in replies.items()}


def check_vector(reply: SparsityReply, plan: SparsityPlan, fingerprint: str) -> None:
    """Raise ProtocolError if a vector is of another model or other channels, or has values outside 0 to 1."""
    if reply.extractor != fingerprint:
        raise ProtocolError(
            f"SparsityReply: extractor: found {reply.extractor:.12}, expected {fingerprint:.12}: the vector "
            "is of another model or other channels"
        )
    found = {name: tuple(tensor.shape) for name, tensor in reply.vector.items()}
    if found != {VECTOR: (plan.length,)}:
        raise ProtocolError(f"SparsityReply: vector: found {found}, expected {VECTOR}: ({plan.length},)")
    low, high = (float(value) for value in reply.vector[VECTOR].aminmax())
    if not 0 <= low <= high <= 1:
        raise ProtocolError(
            f"SparsityReply: vector: found values from {low:.4g} to {high:.4g}, allowed 0 to 1"
        )
