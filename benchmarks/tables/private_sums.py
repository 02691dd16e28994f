"""Heads from sums that left with noise, beside no noise: digits, HAM10000's clinics, CIFAR-100.

Blocks were fixed beforehand. Digits have pixels as they are; widths and patches of HAM10000 were tried on
lesion folds of its training side, in trials that are not kept. Advice from public data:
`private_sums_choice.json`.
"""

from benchmarks.table import STANDARD, Row, Table
from benchmarks.tables.analytic import EPSILONS, NOISE_UNIT, ONE_RELEASE
from benchmarks.tables.pp_fcil import BALANCED
from benchmarks.tables.privacy import epsilon

SEEDS = tuple(range(1000, 1010))
DIGITS, HAM, CIFAR = "private_sums_digits", "private_sums_ham10000", "private_sums_cifar100"
MEANS = (0, 1, 0.2)
RIDGE = "strategy={name: analytic, head: ridge, shrinkage: 1.0e-6, standardise: false}"
LITE0 = (
    "data.path=../../../shared/data/ham10000_128.webp.zip",
    "model.features=[{name: pretrained, network: efficientnet_lite0, stages: 4, symmetry: mirror}, "
    "{name: patches, filters: 400, size: 8, image_size: 32, symmetry: mirror, power: 0.5}]",
)


def _privacy(eps: int, shared: bool, sites: int, blocks: tuple[float, ...] | None = None) -> tuple[str, ...]:
    """Noise that repeats. shared: one noise in all, to which each site adds under masks."""
    weights = "" if blocks is None else f", blocks: {list(blocks)}"
    return (
        f"privacy={{mode: {'sample_shared' if shared else 'sample'}, release: sums, noise_multiplier: "
        f"{ONE_RELEASE[eps]}, accountant: rdp{weights}}}",
        f"secure={{least: 3, quorum: {sites}, assumed_colluders: 1}}" if shared else "secure=null",
    )


def _rows(words: str, experiment: str, sites: int, shared: bool, *changes: str) -> list[Row]:
    return [
        Row(f"{words}, epsilon {eps}", experiment, (*_privacy(eps, shared, sites), *changes))
        for eps in EPSILONS[::-1]
    ]


def _without(experiment: str, label: str, *changes: str) -> Row:
    none = "privacy={mode: none}", "secure=null", "strategy={name: analytic, keep_sites: false}"
    return Row(label, experiment, (*none, *changes))


TABLES = {
    "private_sums_digits": Table(
        "Digits from noised sums alone, with a head that knows its noise",
        [
            *_rows("one noise in all", DIGITS, 5, True),
            *_rows("each site its own noise", DIGITS, 5, False),
            *(
                Row(
                    f"class means alone, {words}, epsilon {eps}",
                    DIGITS,
                    _privacy(eps, shared, 5, MEANS),
                )
                for words, shared in (("one noise in all", True), ("each site its own", False))
                for eps in (2, 1)
            ),
            *(
                Row(f"ridge, one noise in all, epsilon {eps}", DIGITS, (*_privacy(eps, True, 5), RIDGE))
                for eps in EPSILONS[::-1]
            ),
            _without(DIGITS, "no noise, Gaussian head"),
        ],
        seeds=SEEDS,
        measures={"epsilon": epsilon} | dict(STANDARD),
        plain=frozenset({"epsilon"}),
        note=(
            "5 sites, 2 tasks, samples dealt evenly, as in `analytic_noise_digits`. 64 pixels around the "
            f"constant 0.5. {NOISE_UNIT} The noise of four of five sites hides a sample: the sum has 5/4 of "
            "the variance."
        ),
    ),
    "private_sums_ham10000": Table(
        "HAM10000's four clinics from noised sums alone, tasks of 3, 2 and 2 classes",
        [
            *_rows("patches, one noise in all", HAM, 4, True),
            *_rows("patches, each clinic its own noise", HAM, 4, False),
            *_rows(
                "patches, 2,000 images, 48 components, one noise in all",
                HAM,
                4,
                True,
                "data.samples_limit=2000",
                "model.projection=48",
            ),
            _without(HAM, "patches, 96 components, no noise, Gaussian head"),
            *_rows("Lite0 beside patches, one noise in all", HAM, 4, True, *LITE0),
            _without(HAM, "Lite0 beside patches, 192 components, no noise, Gaussian head", *LITE0),
        ],
        seeds=SEEDS,
        measures={"epsilon": epsilon} | BALANCED,
        plain=frozenset({"epsilon"}),
        note=(
            "All 7,994 training images where nothing else is said. 400 patches of 8 x 8 pixels, averaged "
            "over an image and its mirror image, roots, 96 whitened components of crops of two public "
            "photographs. "
            f"{NOISE_UNIT} Three of four clinics hide a sample: the sum has 4/3 of the variance. Test images "
            "are the same at every seed. Lite0 was trained on ImageNet and sees 128 x 96 pixels."
        ),
        features_once=True,
    ),
    "private_sums_cifar100": Table(
        "CIFAR-100 from noised sums alone, all 50,000 training images",
        [
            *_rows("Lite0, 192 components, one noise in all", CIFAR, 5, True),
            *_rows("Lite0, 192 components, each site its own noise", CIFAR, 5, False),
            _without(CIFAR, "192 components, no noise, Gaussian head"),
        ],
        seeds=SEEDS,
        measures={"epsilon": epsilon} | dict(STANDARD),
        plain=frozenset({"epsilon"}),
        scale="hours",
        features_once=True,
        note=(
            "5 sites, Dirichlet 0.5, 2 tasks. EfficientNet-Lite0 at 128 px with its last four stages, which "
            f"was trained on ImageNet. {NOISE_UNIT}"
        ),
    ),
}
