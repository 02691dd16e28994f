"""What an attacker gets back from a site's digests, and what guidance looks like, with and without noise.

`python -m benchmarks.digest_pictures` writes benchmarks/results/digest_pictures.json and .md, and
the picture of docs/methods/feddig.md: what `perennial digest preview` shows the engineer of a site. The site
holds three classes of scikit-learn's digits; the encoder is random unless a row says otherwise.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.markdown import age
from benchmarks.table import EXPERIMENTS, RESULTS, RESULTS_REVISION, ROOT
from benchmarks.tables.feddig import ENCODERS
from perennial.cli.digest_preview import ATTACK_STEPS, SHOWN, draw_pictures, pictures_of
from perennial.client.digests import digests_of
from perennial.client.identity import Identity
from perennial.client.site import open_site
from perennial.config.experiment import load_experiment
from perennial.config.site import SitePolicy
from perennial.foundation.streams import stream
from perennial.models.digest_encoders import build_encoder
from perennial.privacy.noise import SeededNoise

SITE, SEED, TASK = "site-1", 1, 1
PICTURE = ROOT / "docs" / "methods" / "feddig_preview.png"
DRAWN = "4 samples, no noise"
HONEST = ("digests.noise_source=seeded", "digests.epsilon=8")
TRAINED = ENCODERS["autoencoder of Fashion-MNIST"]
RELEASES: Mapping[str, tuple[str, ...]] = {
    "1 sample, no noise": ("digests.per_digest=1",),
    "1 sample, no noise, encoder trained on Fashion-MNIST": ("digests.per_digest=1", TRAINED),
    DRAWN: (),
    f"{DRAWN}, encoder trained on Fashion-MNIST": (TRAINED,),
    "4 samples, honest Laplace noise, epsilon 8": (
        *HONEST,
        "digests.protection=laplace",
        "digests.largest=1",
        "strategy.spread=false",
    ),
    "4 samples, honest Gaussian noise, epsilon 8, delta 1e-5": (
        *HONEST,
        "digests.protection=gauss",
        "digests.norm=4",
        "strategy.spread=false",
    ),
}


def attacked(changes: tuple[str, ...], picture: Path | None = None) -> list[float]:
    """SSIM of the best picture of any sample, for each digest attacked. picture: where to draw them."""
    experiment = load_experiment(EXPERIMENTS / "feddig_digits.yaml", list(changes), SEED)
    with tempfile.TemporaryDirectory() as folder:
        policy = SitePolicy.model_validate({"answers": ["train", "digest"]})
        identity = Identity(SITE, experiment, policy, Path(folder) / "state", "cpu", 1, deployed=True)
        site = open_site(identity)
        encoder = build_encoder(experiment.encoder, site.data.input_shape, experiment.seed)
        noise = SeededNoise(stream(SEED, "digest-pictures"))
        digests, _ = digests_of(site, encoder, TASK, noise)
        pictures = pictures_of(site, encoder, TASK, digests)
        if picture is not None:
            draw_pictures(pictures, picture)
    return pictures.similarity


def as_markdown(content: Mapping[str, Any]) -> str:
    """The page of results. content: of the JSON file."""
    found: Mapping[str, list[float]] = content["each"]
    lines = [
        "# What an attacker gets back from digests of digits",
        "",
        *([old, ""] if (old := age([content])) else []),
        f"`python -m benchmarks.digest_pictures`: {SHOWN} digests of one site, {ATTACK_STEPS} "
        "steps of descent from noise by an attacker who knows the encoder and the weights; structural "
        "similarity of its best picture of any sample (1: equal).",
        "",
        "| release | mean | highest |",
        "| --- | --- | --- |",
        *[f"| {name} | {mean(values):.2f} | {max(values):.2f} |" for name, values in found.items()],
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Attack every release; write figures and the picture."""
    found = {
        name: attacked(changes, PICTURE if name == DRAWN else None) for name, changes in RELEASES.items()
    }
    content: dict[str, Any] = {"steps": ATTACK_STEPS, "site": SITE, "seed": SEED, "each": found}
    content |= {"revision": RESULTS_REVISION}
    RESULTS.joinpath("digest_pictures.json").write_text(json.dumps(content, indent=2) + "\n")
    RESULTS.joinpath("digest_pictures.md").write_text(as_markdown(content))
    print(as_markdown(content))


if __name__ == "__main__":
    main()
