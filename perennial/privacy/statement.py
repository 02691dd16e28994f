"""The exact claim of a privacy block, in the words that report, journal and documentation share."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from perennial.privacy.composition import compose
from perennial.privacy.config import Mode, PrivacyConfig
from perennial.privacy.entries import Entry

# A path is `Message.field`. `tests/privacy/twins` gives two copies of a site, which differ in
# one record, the same requests: what differs in their answers is covered by a charge or listed here, or it
# fails.


@dataclass(frozen=True)
class Uncovered:
    """A field of a message that depends on the data, and for which the ledger is not charged.

    field: regular expression of its path. text: regular expression found in its text. words: what it tells,
    for people.
    """

    field: str
    words: str
    text: str = ""

    def covers(self, path: str, text: str = "") -> bool:
        """Whether this explains a difference at this path with this text."""
        return bool(re.fullmatch(self.field, path) and re.search(self.text, text))


UNCOVERED = (
    Uncovered(
        r"Refusal(\..*)?",
        "whether the site has samples of a task at all, and whether all, or a class, are as many as "
        "policy.min_samples says: it refuses below. An update, sums of features or a sparsity vector that "
        "the site's own noise hides leaves whatever their number",
        r"policy\.min_samples|no sample|per_digest",
    ),
    Uncovered(
        r"Refusal(\..*)?",
        "whether the site's files can be read, and whether its work failed: the error says no more, and is "
        "charged all the same once the data were read for a protected release",
        r"details are in this site's own log",
    ),
    Uncovered(
        r"DigestReply\.digests shape",
        "how many digests a site lends, and which samples they mix, which follow the number of samples of "
        "the task: noise on digests hides a sample that is replaced in its row alone, and a site with a "
        "demand or a budget sends none",
    ),
    Uncovered("time", "how long the site takes, and whether it answers in time"),
    Uncovered("log", "what the site's own log, ledger and pages say, which stay at the hospital"),
)
"""All that shows without a charge, with any protection; tests/privacy/test_twins.py holds it."""


def describe_uncovered() -> list[str]:
    """One sentence for each uncovered field, for people."""
    return [item.words for item in UNCOVERED]


Kind = Mode | Literal["patient"]
"""A mode, and "patient" for mode sample with unit patient."""

UNIT: dict[Kind, str] = {
    "none": "nothing",
    "client_local": "one site: its whole data",
    "client_central": "one site: its whole contribution",
    "client_shared": "one site: its whole contribution",
    "sample": "one training sample of one site",
    "sample_shared": "one training sample of one site",
    "patient": "one patient of one site: all of the patient's training samples there",
}
_ADVERSARY: dict[Kind, str] = {
    "none": "nobody",
    "client_local": "the server, and whoever receives the model",
    "client_central": "whoever receives the model; the server is trusted",
    "client_shared": "the server and up to secure.assumed_colluders sites together, and whoever receives the "
    "model",
    "sample": "the server, and whoever receives the model",
    "sample_shared": "the server and up to secure.assumed_colluders sites together, and whoever receives the "
    "model",
    "patient": "the server, and whoever receives the model",
}
_RELATION: dict[Kind, str] = {
    "none": "none",
    "client_local": "the complete data of one site is replaced",
    "client_central": "the contribution of one site is present, or zero in its place",
    "client_shared": "the contribution of one site is present, or zero in its place",
    "sample": "one training sample is added or removed",
    "sample_shared": "one training sample is added or removed",
    "patient": "one patient is added or removed, with all samples",
}
_MECHANISM: dict[Kind, str] = {
    "none": "none",
    "client_local": "update clipped to L2 norm C, then noised with N(0, (sigma C)^2), at the site",
    "client_central": "update clipped to L2 norm C at the site; N(0, (sigma C w)^2) added once to the "
    "weighted sum at the server, w the largest weight that the strategy may give",
    "client_shared": "update clipped to L2 norm C at the site and rounded towards zero on a grid; each site "
    "adds a discrete Gaussian of variance (sigma C)^2 / m, m being the honest sites of every opened sum, and "
    "the server sees the sum alone (docs/secure_aggregation.md)",
    "sample": "DP-SGD: each sample's gradient clipped to L2 norm C, N(0, (sigma C)^2) on the sum of a batch",
    "sample_shared": "discrete Gaussian noise on each task's sums of features, once; each site adds a share "
    "of variance 1 / m of it, m being the honest sites of every opened sum, and the server sees the sum "
    "alone (docs/secure_aggregation.md)",
    "patient": "DP-SGD over patients: patients are drawn, the sum of a patient's gradients is clipped to L2 "
    "norm C, N(0, (sigma C)^2) on the sum of a batch",
}
_REPLACED: dict[Kind, str] = {
    "sample": "one training sample is replaced by another",
    "patient": "one patient is replaced by another",
}
"""The relation if some of the releases hide only a replacement of the unit."""
BAYESIAN_NEIGHBOURS: dict[Mode, str] = {
    "none": "none",
    "client_local": "the data of one site is replaced by another draw from where it came from",
    "client_central": "none",
    "client_shared": "none",
    "sample": "one training sample, drawn like the others, is added or removed",
    "sample_shared": "none",
}
"""The neighbours of the Bayesian figure: typical ones, while the headline's are the worst."""
_NOT_COVERED: dict[Kind, tuple[str, ...]] = {
    "none": ("anything: a server that makes the model can read single samples out of updates",),
    "client_local": ("that a site takes part, and in which rounds",),
    "client_central": (
        "anything that the server itself sees: each site's clipped update reaches it without noise",
        "that a site takes part, as far as the network, the journal and skipped rounds show it",
    ),
    "client_shared": (
        "that a site takes part, and in which rounds",
        "a server that invents sites, unless the peers' keys are pinned in each site.yaml",
        "more colluding sites than assumed: each one takes its share of the noise with it",
    ),
    "sample": ("a person with many samples: k samples cost about k times the epsilon",),
    "sample_shared": (
        "a person with many samples: k samples cost about k times the epsilon",
        "a server that invents sites, unless the peers' keys are pinned in each site.yaml",
        "more colluding sites than assumed: each one takes its share of the noise with it",
    ),
    "patient": ("a patient with records at several sites: their epsilons add up",),
}
_NEVER_COVERED = (
    "the class list of each task, which is public",
    "what anyone may learn about a person from the population at large",
)


@dataclass(frozen=True)
class Statement:
    """What may be claimed about a run's privacy, and what may not.

    epsilon: infinite without noise.
    bayesian_epsilon: the Bayesian figure, for the neighbours that bayesian_relation describes.
    """

    unit: str
    adversary: str
    relation: str
    mechanism: str
    accountant: str
    epsilon: float
    delta: float
    bayesian_epsilon: float | None
    bayesian_relation: str
    not_covered: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is null beside "protected": false."""
        finite = math.isfinite(self.epsilon)
        return asdict(self) | {"epsilon": self.epsilon if finite else None, "protected": finite}


def describe(
    privacy: PrivacyConfig,
    releases: Sequence[Entry],
    *,
    units: int | None = None,
    bayesian_epsilon: float | None = None,
    also_open: Sequence[str] = (),
) -> Statement:
    """The claim after one site's releases under one privacy block.

    releases: of every kind, as the site charges them. Seeded noise protects nothing: epsilon is then what
    they would cost with noise from the secure source, and a warning says so. units: sites or samples that the
    guarantee speaks of, where known; a delta of 1 / units or more is worth nothing. also_open: what else
    leaves without noise in the experiment at hand.
    """
    kind: Kind = "patient" if privacy.hidden_unit == "patient" else privacy.mode
    unit = privacy.hidden_unit or "site"
    secure = [replace(entry, seeded=False) for entry in releases]
    cost = compose(secure, privacy.delta, privacy.accountant, unit)
    replaced = privacy.mode == "sample" and cost.relation == "replace"
    in_its_row = any(entry.kind == "digest" for entry in releases)
    return Statement(
        unit=UNIT[kind],
        adversary=_ADVERSARY[kind],
        relation=_REPLACED[kind] + " in its row" * in_its_row if replaced else _RELATION[kind],
        mechanism=_describe_mechanism(privacy, kind, releases),
        accountant=privacy.accountant,
        epsilon=math.inf if privacy.mode == "none" else cost.epsilon,
        delta=privacy.delta,
        bayesian_epsilon=bayesian_epsilon,
        bayesian_relation=BAYESIAN_NEIGHBOURS[privacy.mode],
        not_covered=(*_NOT_COVERED[kind], *also_open, *describe_uncovered(), *_NEVER_COVERED),
        warnings=tuple(_list_warnings(privacy, releases, units)),
    )


def _describe_mechanism(privacy: PrivacyConfig, kind: Kind, releases: Sequence[Entry]) -> str:
    if privacy.mode == "none":
        return _MECHANISM["none"]
    usual, what = ("statistics", "sums") if privacy.release == "sums" else ("update", "updates")
    if privacy.release == "sums":
        once = "discrete Gaussian noise on each task's sums of features, once"
        said = (
            f"{_MECHANISM[kind] if privacy.shared else once}; sigma "
            f"{privacy.noise_multiplier:g} times what one sample moves them by, blocks of products, sums and "
            f"counts weighted {', '.join(f'{weight:g}' for weight in privacy.blocks)}"
        )
    else:
        said = f"{_MECHANISM[kind]}; sigma {privacy.noise_multiplier:g}, C {privacy.clip_norm:g}"
    beside = sorted({entry.kind.replace("_", " ") for entry in releases} - {usual})
    return f"{said}; beside {what}, with noise of their own: {', '.join(beside)}" if beside else said


def _list_warnings(privacy: PrivacyConfig, releases: Sequence[Entry], units: int | None) -> list[str]:
    warnings = []
    if privacy.mode == "none":
        return warnings
    if any(entry.seeded for entry in releases):
        warnings.append("the noise came from a seed that others may know: a test, not a protection")
    if privacy.noise_multiplier == 0:
        warnings.append("noise_multiplier is 0: updates are clipped and otherwise in the clear")
    if units is not None and privacy.delta >= 1 / units:
        warnings.append(
            f"delta {privacy.delta:g} is not below 1 / {units}: releasing one unit in the clear would "
            "satisfy it"
        )
    return warnings
