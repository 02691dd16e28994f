"""Whether single images come out of each channel, under each protection, for each adversary: the one table.

`site check`, `site review`, reports and cards say what stands here and nothing beside it. Every "no" names a
program that tried (tests/redteam/hostile_server.py); its tests hold the table against what they recovered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Protection = Literal[
    "shut", "clear", "few", "floor", "central", "masks", "unpinned", "shared", "weak", "noise"
]
PROTECTIONS: dict[Protection, str] = {
    "shut": "refused by the policy or the protection that it demands",
    "clear": "leaves as it is; a floor of samples changes nothing for a server that makes the model",
    "few": "exact, of fewer models than a small image has bits (policy.max_evaluations)",
    "floor": "mixed by a fixed encoder from as many samples as policy.min_samples says",
    "central": "cut here; the server sees it, and is trusted to add the noise",
    "masks": "a part of masked sums without noise; that of all sites would stop a server that lies "
    "(policy.require_privacy client_shared or sample_shared)",
    "unpinned": "the noise of all sites, but policy.peers pins nobody, so that a server can make sites up",
    "shared": "the noise of all sites on a sum with pinned peers, as long as no more of them than the "
    "experiment assumes work with the server",
    "weak": "noise under a budget that lets it be too little: epsilon above 10, or delta above 0.001",
    "noise": "noise from this site, charged to its ledger",
}
"""What protects a channel, in words."""
LYING = "a server that lies"
HONEST = "a server that keeps to the protocol"
OTHER = "another site"
ADVERSARIES = (LYING, HONEST, OTHER)


@dataclass(frozen=True)
class Cell:
    """One cell of the table: a channel under a protection.

    images: for each adversary, whether it can get single images; None where it sees nothing of the channel.
    attacks: for each adversary, the program that shows it, or that tried; '' if none did, and the worst is
    assumed.
    """

    channel: str
    protection: Protection
    images: tuple[bool, bool, bool | None]
    attacks: tuple[str, str, str]

    @property
    def why(self) -> str:
        """The protection in words."""
        return PROTECTIONS[self.protection]

    def verdict(self, adversary: str = LYING) -> str:
        """'YES (program)', 'no (program)' or '-': whether this adversary gets single images."""
        place = ADVERSARIES.index(adversary)
        found = self.images[place]
        said = self.attacks[place] or "taken at its worst"
        return "-" if found is None else f"{'YES' if found else 'no'} ({said})"


UPDATES, COUNTS, MEANS = "updates", "counts of right answers", "sums for class means"
DIGESTS, SPARSITY = "digests", "sparsity vectors"
SUMS = "sums of features"
_IMPRINT, _MASKED, _MODELS = "imprinted model", "masked sum, imprinted model", "difference of two models"
_WORDS, _PIXELS, _BRIGHT = (
    "masked words of one site",
    "counts, pixel by pixel",
    "class means, the brightest image",
)
_SILENCE, _ENCODED = "sparsity, the brightest image", "digests of one sample"
_SUMS, _MASKED_SUMS = "sums of one sample's features", "masked sums of features"


def _rows(channel: str, *cells: tuple[Protection, bool, str]) -> Iterator[Cell]:
    """Cells in which the server's honesty changes nothing that is known, and others see nothing."""
    for protection, images, attack in cells:
        honest = (images, attack)
        if protection in ("masks", "unpinned"):
            # what a server cannot open without lying it sees under masks alone, or with the noise of all
            honest = (False, _WORDS)
        yield Cell(channel, protection, (images, honest[0], None), (attack, honest[1], ""))


def _updates() -> Iterator[Cell]:
    """Other sites see the model, and with it the sum of the updates."""
    others: dict[Protection, bool] = {"clear": True, "masks": True, "weak": True}
    for cell in _rows(
        UPDATES,
        ("shut", False, f"update, {_IMPRINT}"),
        ("clear", True, f"update, {_IMPRINT}"),
        ("central", True, "update cut to 1e6 in mode client_central"),
        ("masks", True, _MASKED),
        ("unpinned", True, ""),
        ("shared", False, f"{_MASKED}, with noise"),
        ("weak", True, ""),
        ("noise", False, f"update in mode sample, {_IMPRINT}"),
    ):
        images = others.get(cell.protection, False)
        said = (*cell.attacks[:2], "" if cell.protection == "weak" else _MODELS)
        if cell.protection == "shut":
            yield cell
        else:
            yield Cell(UPDATES, cell.protection, (*cell.images[:2], images), said)


TABLE: dict[tuple[str, Protection], Cell] = {
    (cell.channel, cell.protection): cell
    for cell in (
        *_updates(),
        *_rows(
            COUNTS,
            ("shut", False, _PIXELS),
            ("clear", True, _PIXELS),
            ("few", False, f"few {_PIXELS}"),
            ("unpinned", True, ""),
            ("weak", True, f"weakly noised {_PIXELS}"),
            ("noise", False, f"noised {_PIXELS}"),
        ),
        *_rows(
            MEANS,
            ("shut", False, "class means, one exemplar a class"),
            ("clear", True, _BRIGHT),
            ("masks", True, ""),
            ("weak", True, ""),
            ("noise", False, f"noised {_BRIGHT}"),
        ),
        *_rows(
            DIGESTS,
            ("shut", False, _ENCODED),
            ("clear", True, _ENCODED),
            ("floor", False, "digests of as many as the floor"),
            ("weak", True, ""),
            ("noise", False, "digests in Laplace noise"),
        ),
        *_rows(
            SPARSITY,
            ("shut", False, _SILENCE),
            ("clear", True, _SILENCE),
            ("weak", True, ""),
            ("noise", False, f"noised {_SILENCE}"),
        ),
        *_rows(
            SUMS,
            ("shut", False, _SUMS),
            ("clear", True, _SUMS),
            ("masks", True, _MASKED_SUMS),
            ("unpinned", True, ""),
            ("shared", False, f"{_MASKED_SUMS}, with noise"),
            ("weak", True, f"weakly noised {_SUMS}"),
            ("noise", False, f"noised {_SUMS}"),
        ),
    )
}


def protection_of_mode(mode: str, *, masks: bool) -> Protection:
    """The protection of what an experiment releases, by its privacy.mode. masks: whether it has `secure`."""
    if mode == "none":
        return "masks" if masks else "clear"
    if mode == "client_central":
        return "central"
    return "shared" if mode in ("client_shared", "sample_shared") else "noise"
