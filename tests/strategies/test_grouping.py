"""When clusters are found, when they stay, and when they are found anew."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perennial.models.sparsity import VectorSettings
from perennial.strategies.clustered_personalisation.grouping import Grouping

SETTINGS = VectorSettings(2, 1, "average", None)
APART = {"a": (0.0, 0.0), "b": (0.1, 0.0), "c": (0.8, 0.8), "d": (0.9, 0.8)}


class Answering:
    """A grouping whose sites answer with the vectors that a test sets. asked: sites, one list a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grouping = Grouping("sparsity", 2, None, SETTINGS)
        self.asked: list[list[str]] = []
        monkeypatch.setattr(self.grouping, "_ask", self._answer)

    def _answer(self, grid: Any, exchange: Any, request: Any, services: Any, asked: Any, notes: Any) -> Any:
        self.asked.append(list(asked))
        return {site: self._vectors[site] for site in asked}

    def assign(self, vectors: Mapping[str, tuple[float, ...]], *, anew: bool) -> dict[str, int]:
        self._vectors = {site: np.array(vector) for site, vector in vectors.items()}
        request, nothing = SimpleNamespace(sites=dict.fromkeys(sorted(vectors), 0)), SimpleNamespace()
        services = SimpleNamespace(experiment=SimpleNamespace(seed=1))
        arguments: Any = (nothing, nothing, request, services)
        self.grouping.assign(*arguments, anew=anew, notes=[])
        return dict(self.grouping.labels)


def test_clusters_stay_while_sites_move_little(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Answering(monkeypatch)
    first = sites.assign(APART, anew=True)
    assert first == {"a": 0, "b": 0, "c": 1, "d": 1}
    # b is nearer to the other centre now, but nobody has moved by half the distance of the centres
    moved = APART | {"b": (0.35, 0.35)}
    assert sites.assign(moved, anew=True) == first
    assert sites.grouping.vectors["b"].tolist() == [0.35, 0.35]


def test_clusters_are_found_anew_when_a_site_has_moved_far(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Answering(monkeypatch)
    sites.assign(APART, anew=True)
    assert sites.assign(APART | {"b": (0.85, 0.8)}, anew=True) == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert sites.grouping.list_members(1) == {"b", "c", "d"}


def test_inside_a_phase_only_sites_without_a_cluster_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Answering(monkeypatch)
    first = sites.assign(APART, anew=True)
    assert sites.assign(APART, anew=False) == first
    assert sites.assign(APART | {"late": (0.7, 0.9)}, anew=False) == first | {"late": 1}
    assert sites.asked == [["a", "b", "c", "d"], ["late"]]
