"""What all releases of a site cost together, for one unit and one neighbouring relation.

Releases differ in what they hide, and figures that hide different things do not add up.
The rules, each conservative:

- A guarantee for a whole site also holds for each of its patients and samples, one for a patient for each of
  the patient's samples; one for a sample says nothing finite about a patient or the site.
- A replacement is a removal and an addition. A full-participation Gaussian that hides one of them hides both
  with half its multiplier; anything else pays group privacy for two: (2 epsilon, (1 + e^epsilon) delta).
- A site's replacement covers any change of one patient or sample, added, removed or replaced; so does a
  patient's for one of the samples.
- Gaussian releases compose through the accountant, by Renyi orders if one of them is discrete; stated
  (epsilon, delta) add up.

Dwork and Roth 2014, theorems 2.2 and 3.16; Vadhan 2017, lemma 2.2 (group privacy).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from perennial.privacy.accountants import Accountant, make_accountant
from perennial.privacy.config import AccountantName, Unit
from perennial.privacy.entries import Entry, Relation

_UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True)
class Cost:
    """A privacy guarantee over a set of releases.

    epsilon: infinite when one of the releases left without protection; seeded noise is no protection.
    unprotected: how many such releases there are.
    """

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    accountant: AccountantName
    releases: int
    unprotected: int
    trusts_server: bool

    def to_json(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is the word "infinite"."""
        return vars(self) | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else "infinite"}


def find_common_unit(entries: Iterable[Entry]) -> Unit:
    """The largest unit that every one of these releases hides."""
    units: list[Unit] = [entry.unit for entry in entries]
    return _UNITS[max((_UNITS.index(unit) for unit in units), default=0)]


def compose(
    entries: Sequence[Entry] | Mapping[Entry, int],
    delta: float,
    accountant: AccountantName = "prv",
    unit: Unit | None = None,
) -> Cost:
    """The cost of all entries together. entries: a mapping says how often each was released.

    unit: None takes the largest unit that every release hides. The relation is add_remove where every entry
    covers it, and replace otherwise.
    """
    counts = of_one_sample(entries if isinstance(entries, Mapping) else Counter(entries))
    unit = unit or find_common_unit(counts)
    relation: Relation = (
        "add_remove" if all(covers_add_remove(entry, unit) for entry in counts) else "replace"
    )
    if any(entry.mechanism == "discrete_gaussian" for entry in entries):
        accountant = "rdp"
    unprotected = sum(count for entry, count in counts.items() if not entry.protected)
    hidden = unprotected == 0 and hides(find_common_unit(counts), unit)
    return Cost(
        epsilon=_compute_epsilon(counts, delta, accountant, unit, relation) if hidden else math.inf,
        delta=delta,
        unit=unit,
        relation=relation,
        accountant=accountant,
        releases=sum(counts.values()),
        unprotected=unprotected,
        trusts_server=any(entry.trusts_server for entry in counts),
    )


def of_one_sample(counts: Mapping[Entry, int]) -> dict[Entry, int]:
    """How often one sample can be in each release: of disjoint parts of the data, the largest count.

    McSherry 2009 (parallel composition). Only parts of one run of one experiment are known to be disjoint:
    "task 1" of another experiment may hold what "task 2" of this one holds. A whole site is in all parts, so
    what hides a site adds up. Lines of version 0.1.0 name no scope, and count for every sample.
    """
    found: Counter[Entry] = Counter()
    parts: dict[tuple[Entry, str], Counter[str]] = {}
    for entry, count in counts.items():
        whole = replace(entry, part="", records="", note="", time="") if entry.part else entry
        if entry.scope:
            alike = replace(whole, run="", experiment=""), entry.scope
            parts.setdefault(alike, Counter())[entry.part] += count
        else:
            found[whole] += count
    for (whole, _), times in parts.items():
        found[whole] += max(times.values())
    return dict(found)


def covers_add_remove(entry: Entry, unit: Unit) -> bool:
    """Whether the entry hides adding or removing the unit, as replacing a larger unit also does."""
    return entry.relation == "add_remove" if entry.unit == unit else hides(entry.unit, unit)


def hides(found: Unit, wanted: Unit) -> bool:
    """Whether a guarantee for unit `found` also holds for `wanted`: a unit of the same size or smaller."""
    return _UNITS.index(found) <= _UNITS.index(wanted)


def needs_replacement(entry: Entry, unit: Unit, relation: Relation) -> bool:
    """Whether the entry hides adding and removing alone, and the claim needs it to hide a replacement."""
    return entry.relation == "add_remove" and (relation == "replace" or entry.unit != unit)


def _compute_epsilon(
    counts: Mapping[Entry, int], delta: float, accountant: AccountantName, unit: Unit, relation: Relation
) -> float:
    direct, paired = make_accountant(accountant), make_accountant(accountant)
    epsilon, left = 0.0, delta
    for entry, count in counts.items():
        twice = needs_replacement(entry, unit, relation)
        if entry.epsilon is not None and entry.delta is not None:
            epsilon += count * (2 * entry.epsilon if twice else entry.epsilon)
            left -= count * (_group_delta(entry.epsilon, entry.delta) if twice else entry.delta)
        elif entry.noise_multiplier is not None and entry.sample_rate is not None and entry.steps is not None:
            if twice and entry.sample_rate < 1:
                paired.step(entry.noise_multiplier, entry.sample_rate, count * entry.steps)
            else:
                noise = entry.noise_multiplier / 2 if twice else entry.noise_multiplier
                direct.step(noise, entry.sample_rate, count * entry.steps)
    if not left > 0:
        return math.inf
    if not paired.history():
        return epsilon + direct.epsilon(left)
    if direct.history():
        left /= 2
    return epsilon + direct.epsilon(left) + _compute_paired_epsilon(paired, left)


def _group_delta(epsilon: float, delta: float) -> float:
    """Delta of group privacy for two; infinite where e^epsilon is."""
    if delta == 0:
        return 0.0
    return delta * (1 + math.exp(epsilon)) if epsilon < 700 else math.inf


def _compute_paired_epsilon(accountant: Accountant, delta: float) -> float:
    """Epsilon for a group of two: 2 epsilon(d) for the largest d found with (1 + e^epsilon(d)) d <= delta."""
    smaller = delta / 2
    for _ in range(50):
        epsilon = accountant.epsilon(smaller)
        if _group_delta(epsilon, smaller) <= delta:
            return 2 * epsilon
        if epsilon > 300:
            break
        smaller = min(smaller, delta / (1 + math.exp(epsilon))) * 0.9
    return math.inf
