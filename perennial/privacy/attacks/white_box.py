"""White-box tests of recorded releases against what is claimed and charged for them.

Nothing is guessed: the difference between a released value and the same value before its noise must look like
a draw from the claimed distribution; no single contribution may be longer than the clip norm; batches must be
as large as the sampling rate makes them; and every release must be charged, to the records it came from.

All tests together raise a false alarm with probability FALSE_ALARMS at most.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import binom, chi2, norm

FALSE_ALARMS = 0.002
"""Of all tests on one recording together: a false alarm in 500."""
_TESTS = 7
_ROUNDING = 1e-4
"""By how much 32-bit arithmetic may lengthen a clipped vector."""


@dataclass(frozen=True)
class Recording:
    """Releases of one run, and what is claimed of them.

    noise: of each release, (n,) values. std: claimed of each value. shares: for masked sums, which of `noise`
    are added in one sum; honest: how many shares have the whole variance, std being that of one share.
    largest: norms of single contributions; clip_norm: the claimed bound, None where there is none.
    drawn: (batch, units) of each step; sample_rate: claimed. made, charged: how many releases of each kind
    there were, and how many the ledgers have. parts: (what is disjoint within, part, members) as charged.
    """

    noise: list[np.ndarray]
    std: float
    shares: list[list[int]] = field(default_factory=list)
    honest: int = 1
    largest: tuple[float, ...] = ()
    clip_norm: float | None = None
    drawn: list[tuple[int, int]] = field(default_factory=list)
    sample_rate: float | None = None
    made: Mapping[str, int] = field(default_factory=dict)
    charged: Mapping[str, int] = field(default_factory=dict)
    parts: list[tuple[str, str, frozenset[int]]] = field(default_factory=list)


def findings(seen: Recording) -> list[str]:
    """What in a recording contradicts its claim, one sentence each; [] if nothing does."""
    level = FALSE_ALARMS / _TESTS
    return [
        *_distribution(seen, level),
        *_sums(seen, level),
        *_clip(seen),
        *_sampling(seen, level),
        *_charges(seen),
        *_parts(seen),
    ]


def _distribution(seen: Recording, level: float) -> list[str]:
    """Mean, variance and independence of the noise, each two-sided; the variance on both sides by itself."""
    if not seen.noise or seen.std == 0:
        return []  # without noise nothing is claimed of it
    values = np.concatenate(seen.noise) / seen.std
    found, count = [], len(values)
    mean = float(values.sum()) / math.sqrt(count)
    if abs(mean) > norm.isf(level / 2):
        found.append(f"noise: its mean lies {abs(mean):.1f} standard errors from 0")
    squares = float(values @ values)
    if squares < chi2.ppf(level / 2, count):
        found.append(f"noise: {math.sqrt(squares / count):.3f} of the claimed standard deviation")
    if squares > chi2.isf(level / 2, count):
        found.append(
            f"noise: {math.sqrt(squares / count):.3f} of the claimed standard deviation, which is more"
        )
    products = np.concatenate(
        [
            one[: len(other)] * other[: len(one)]
            for one, other in zip(seen.noise, seen.noise[1:], strict=False)
        ]
        + [one[:-1] * one[1:] for one in seen.noise]
    )
    if len(products):
        # a sum of products of independent normal values; n - 1 sums of the same kind are nearly normal
        related = float(products.sum()) / seen.std**2 / math.sqrt(len(products))
        if abs(related) > max(norm.isf(level / 2), _of_products(level, len(products))):
            found.append(f"noise: releases are correlated, by {related / math.sqrt(len(products)):.3f}")
    return found


def _of_products(level: float, count: int) -> float:
    """A bound on a standardised sum of products of normal values: Bernstein's, for short recordings."""
    log = math.log(2 / level)
    return math.sqrt(2 * log) + log / math.sqrt(count) if count < 1000 else 0.0


def _sums(seen: Recording, level: float) -> list[str]:
    """Whether every masked sum has at least the claimed noise: that of `honest` shares."""
    squares, count = 0.0, 0
    for together in seen.shares if seen.std else ():
        total = np.sum([seen.noise[place] for place in together], axis=0)
        # more shares than are needed add noise, which is claimed by nobody
        total = total / (seen.std * math.sqrt(max(len(together), seen.honest)))
        squares, count = squares + float(total @ total), count + len(total)
    if count and squares < chi2.ppf(level, count):
        return [f"masked sums: {math.sqrt(squares / count):.3f} of the standard deviation of all shares"]
    return []


def _clip(seen: Recording) -> list[str]:
    if seen.clip_norm is None or not seen.largest:
        return []
    largest = max(seen.largest)
    if largest > seen.clip_norm * (1 + _ROUNDING):
        return [f"clip: one contribution has length {largest:.4g}, claimed at most {seen.clip_norm:.4g}"]
    return []


def _sampling(seen: Recording, level: float) -> list[str]:
    if seen.sample_rate is None or not seen.drawn:
        return []
    drawn, asked = (sum(column) for column in zip(*seen.drawn, strict=True))
    low, high = binom.cdf(drawn, asked, seen.sample_rate), binom.sf(drawn - 1, asked, seen.sample_rate)
    if min(low, high) < level / 2:
        return [f"sampling: batches hold {drawn / asked:.4g} of their units, claimed {seen.sample_rate:.4g}"]
    return []


def _charges(seen: Recording) -> list[str]:
    made, charged = Counter(seen.made), Counter(seen.charged)
    return [
        f"ledger: {made[kind]} of {kind} were made, {charged[kind]} are charged"
        for kind in sorted(made | charged)
        if made[kind] > charged[kind]
    ]


def _parts(seen: Recording) -> list[str]:
    """Whether releases that are charged as over disjoint parts have records in common."""
    known: dict[str, dict[int, str]] = {}
    for scope, part, members in seen.parts:
        before = known.setdefault(scope, {})
        shared = {member for member in members if before.get(member, part) != part}
        if shared:
            return [
                f"ledger: {part} is charged as disjoint, and shares {len(shared)} records with another part"
            ]
        before.update(dict.fromkeys(members, part))
    return []
