"""The cross-site table of a closed-form run, from the sums that it keeps; no site is asked anything."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.cross_site import (
    EVERYTHING,
    Judge,
    cross_site,
)
from perennial.learning.analytic.solve import LinAlgError, Sums
from perennial.strategies.analytic.kept import KeptSums

WIDEST = 1024
"""Features that heads are solved on; sums of more are projected to the total's leading eigenvectors."""
DEAR = 1e11
"""Multiplications from which on the table is made once, at the end of a run, and not after every task."""


def work(sites: int, width: int) -> float:
    """Approximate number of multiplications that the table takes. width: features with the constant."""
    used = min(width, WIDEST)
    return sites * sites * used**3 / 3 + (10 * width**3 if width > WIDEST else 0)


def compute_basis(total: Sums, widest: int = WIDEST) -> Tensor | None:
    """(d, widest) leading eigenvectors of the matrix of products; None if d is at most `widest`."""
    if len(total.gram) - 1 <= widest:
        return None
    return torch.linalg.eigh(total.gram[:-1, :-1])[1][:, -widest:]


def project_sums(sums: Sums, basis: Tensor | None) -> Sums:
    """The sums of features projected to a basis, with the constant unchanged; basis None: the same sums."""
    if basis is None:
        return sums
    width = basis.shape[1]
    gram = torch.empty(width + 1, width + 1, dtype=torch.float64)
    gram[:-1, :-1] = basis.T @ sums.gram[:-1, :-1] @ basis
    gram[:-1, -1] = gram[-1, :-1] = basis.T @ sums.gram[:-1, -1]
    gram[-1, -1] = sums.gram[-1, -1]
    rows = torch.cat([sums.sums[:, :-1] @ basis, sums.sums[:, -1:]], dim=1)
    return Sums(gram, rows, sums.counts, sums.constant)


def gather_site_sums(kept: KeptSums, classes: range, judge: Judge = EVERYTHING) -> dict[str, Sums]:
    """site -> its sums of all tasks, of the features that `judge` sees, projected to WIDEST if they are more.

    One site's sums are in memory at a time beside the projected ones. Raises DataError if there are none;
    StateError if a site's own sums were not kept.
    """
    if kept.total is None:
        raise DataError("cross-site table: no site has sent sums yet")
    basis = compute_basis(judge.seen(Sums.of(kept.total.over(classes))))
    found: dict[str, Sums] = {}
    for site in kept.sites:
        own = kept.of_site(site, classes)
        if own is not None and own.samples:
            found[site] = project_sums(judge.seen(Sums.of(own)), basis)
    return found


def build_block(kept: KeptSums, classes: range, judge: Judge = EVERYTHING) -> dict[str, Any]:
    """The `cross_site` block of summary.json. Raises DataError if it cannot be made.

    sites: site -> {apart, skill, given, marked, benefit: {other: share}}.
    """
    sites = gather_site_sums(kept, classes, judge)
    assert kept.total is not None
    width = kept.total.width - 1 if judge.places is None else len(judge.places)
    # what was projected has neither the run's features nor, so, its shrinkage
    table = cross_site(sites, judge if width <= WIDEST else EVERYTHING)
    return {
        "features": table.features,
        "sites": {
            name: {
                "apart": row.apart,
                "skill": row.skill,
                "given": table.given.get(name),
                "marked": table.marked.get(name),
                "benefit": row.benefit,
            }
            for name, row in table.rows.items()
        },
    }


def try_build_block(kept: KeptSums, classes: range, judge: Judge = EVERYTHING) -> dict[str, Any]:
    """The `cross_site` block; {} if it cannot be made, as for weighted sums, which are kept elsewhere."""
    if kept.folder is None:
        return {}
    try:
        return build_block(kept, classes, judge)
    except (DataError, LinAlgError):
        return {}


def summarise_block(block: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The table for the journal: site -> {skill, given, marked, benefit}, without the classes."""
    return {
        site: {
            "skill": _round_value(row["skill"]),
            "given": _round_value(row["given"]),
            "marked": row["marked"],
            "benefit": {other: _round_value(value) for other, value in row["benefit"].items()},
        }
        for site, row in block["sites"].items()
    }


def find_marked(block: Mapping[str, Any]) -> set[str]:
    """Names of the sites that a table marks."""
    return {site for site, row in block.get("sites", {}).items() if row["marked"]}


def describe_marked(block: dict[str, Any]) -> list[str]:
    """A sentence for each marked site, for the journal."""
    return [
        f"site {name} contradicts the others: {row['marked']}. Other habits of labelling, a mistake "
        "and false sums look alike here: talk to the site; its sums can be withdrawn at any time"
        for name, row in block["sites"].items()
        if row["marked"]
    ]


def _round_value(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
