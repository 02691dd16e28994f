"""What a turn of a ring gives away: faces searched from the change of the model, or from the features.

The features are those that the change reveals.

`python -m benchmarks.ring_security ORL.npz` writes benchmarks/results/tricon_sf_security.md. The
file holds the ORL faces (Samaria and Harter 1994): x (400, 112, 92) uint8 and y (400,) int64.

The worst case for the site: one step on one face, and an adversary who knows the model that the site was
given. The server of a relayed ring is one; so are the site before and the site after, together.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.foundation.streams import stream, torch_seed
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.feature_noise import noised_features
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.models.relabel import relabel
from perennial.privacy.attacks.digest_reconstruction import reconstruct_digest
from perennial.privacy.attacks.gradient_inversion import infer_labels, invert_gradient
from perennial.privacy.attacks.linkage import match_neurons
from perennial.privacy.attacks.similarity import structural_similarity
from perennial.privacy.noise import SeededNoise
from perennial.privacy.protection import protect_update

RESULT = Path(__file__).parent / "results" / "tricon_sf_security.md"
FACES, STEPS, LR, SEED = 8, 50, 0.1, 1
FIRST_LAYER = "backbone.layers.1"
Seen = dict[str, Tensor]
"""What the adversary takes for the site's update, by parameter."""


@dataclass(frozen=True)
class Condition:
    """What the adversary has, and how the site protects itself.

    see: from the model, its update and the face's number to what the adversary has.
    clip, std: of the first layer's outputs while the site trains; None leaves them alone.
    frozen: the first layer is not trained.
    by_features: the face is searched from its features, which the update of the head reveals.
    """

    see: Callable[[IncrementalModel, Tensor, int], Seen]
    clip: float | None = None
    std: float = 0.0
    frozen: bool = False
    attack: Literal["gradient", "row", "features"] = "gradient"

    @contextmanager
    def features(self, model: IncrementalModel, std: float, face: int) -> Iterator[None]:
        """Inside, the model clips and noises as the site does, with a deviation of its own."""
        if self.clip is None:
            yield
            return
        generator = torch.Generator().manual_seed(torch_seed(stream(SEED, "features", face)))
        with noised_features(model, FIRST_LAYER, self.clip, std, generator):
            yield


def main(path: str) -> None:
    """Attack FACES faces under each condition and write the table."""
    with np.load(path, allow_pickle=False) as arrays:
        x, y = torch.from_numpy(arrays["x"]).float() / 255, torch.from_numpy(arrays["y"]).long()
    images = F.interpolate(x[:, None], size=(28, 23), mode="area")
    chosen = stream(SEED, "faces").permutation(len(y))[:FACES].tolist()
    lines = [
        "# A face from one turn of a ring (ORL, 28 x 23, two-layer perceptron, one step on one face)",
        "",
        f"`python -m benchmarks.ring_security ORL.npz`, {FACES} faces, {STEPS} steps of the "
        "search. Similarity",
        "is SSIM with the true face, 1 for equal; the last line is what the face of somebody else scores.",
        "",
        "| what the adversary sees | similarity | label found |",
        "| --- | --- | --- |",
    ]
    for name, condition in CONDITIONS.items():
        found = [attacked(images[i : i + 1], y[i : i + 1], i, condition) for i in chosen]
        similarity, right = [each[0] for each in found], [each[1] for each in found]
        spread = f"{mean(similarity):.2f} ± {stdev(similarity):.2f}"
        lines.append(f"| {name} | {spread} | {sum(right)} of {FACES} |")
        print(lines[-1], flush=True)
    others = [
        float(structural_similarity(images[i : i + 1], images[(i + 200) % len(y)][None])) for i in chosen
    ]
    lines.append(f"| nothing: a face of somebody else | {mean(others):.2f} ± {stdev(others):.2f} | |")
    RESULT.write_text("\n".join(lines) + "\n")


def attacked(image: Tensor, label: Tensor, face: int, condition: Condition) -> tuple[float, bool]:
    """(similarity of the face that was found, whether the label was). image: (1, 1, H, W) in [0, 1]."""
    model = build_model(
        ModelConfig.model_validate({"name": "mlp", "hidden": [64]}), tuple(image.shape[1:]), 40, SEED
    )
    flat = FlatParameters(model)
    flat.gradient.zero_()
    with condition.features(model, condition.std, face):
        F.cross_entropy(model(image), label).backward()
    seen = condition.see(model, -LR * flat.gradient.clone(), face)
    gradient = {name: -update for name, update in seen.items()}
    if condition.frozen:
        gradient = {name: gradient[name] for name in ("head.weight", "head.bias")}
    generator = torch.Generator().manual_seed(torch_seed(stream(SEED, "search", face)))
    right = bool(infer_labels(gradient["head.weight"], 1) == label)
    shape = (image.shape[1], image.shape[2], image.shape[3])
    # the label is given, so that a condition that hides it is not also credited with hiding the face
    match condition.attack:
        case "gradient":
            found = invert_gradient(
                model, gradient, shape, generator, labels=label, steps=STEPS, smoothness=1e-3
            ).images
        case "row":
            neuron = gradient[f"{FIRST_LAYER}.bias"].abs().argmax()
            row = gradient[f"{FIRST_LAYER}.weight"][neuron] / gradient[f"{FIRST_LAYER}.bias"][neuron]
            found = row.view(1, *shape).clamp(0, 1)
        case "features":
            feature = gradient["head.weight"][label[0]] / gradient["head.bias"][label[0]]
            with condition.features(model, 0.0, face):
                found = reconstruct_digest(
                    model.features, feature, shape, torch.ones(1), generator, steps=4 * STEPS, smoothness=0.1
                )
    return float(structural_similarity(image, found)), right


def plain(model: IncrementalModel, update: Tensor, face: int) -> Seen:
    return FlatParameters(model).views(update)


def relabelled(model: IncrementalModel, update: Tensor, face: int) -> Seen:
    """The model that is handed on was relabelled, and the adversary subtracts index by index."""
    before, after = _handed_on(model, update, face)
    return {name: after[name] - before[name] for name in before}


def aligned(model: IncrementalModel, update: Tensor, face: int) -> Seen:
    """The adversary matches the neurons first (Ainsworth et al. 2023)."""
    before, after = _handed_on(model, update, face)
    inner = next(name for name in before if name.endswith("weight") and name != "head.weight")
    bias = inner.replace("weight", "bias")
    (order,) = match_neurons([before[inner], before["head.weight"]], [after[inner], after["head.weight"]])
    after |= {inner: after[inner][order], bias: after[bias][order]}
    after["head.weight"] = after["head.weight"][:, order]
    return {name: after[name] - before[name] for name in before}


def noisy(clip: float, multiplier: float) -> Callable[[IncrementalModel, Tensor, int], Seen]:
    """The update is clipped and noised before it leaves the site."""

    def condition(model: IncrementalModel, update: Tensor, face: int) -> Seen:
        protect_update(update, clip, multiplier, SeededNoise(stream(SEED, "noise", face)))
        return FlatParameters(model).views(update)

    return condition


def _handed_on(model: IncrementalModel, update: Tensor, face: int) -> tuple[Seen, Seen]:
    """(parameters before the turn, parameters handed on after it); model is given back as it was."""
    flat = FlatParameters(model)
    start = flat.vector.clone()
    before = {name: tensor.clone() for name, tensor in flat.views(start).items()}
    flat.vector.add_(update)
    relabel(model, stream(SEED, "relabel", face))
    after = {name: tensor.clone() for name, tensor in flat.views(flat.vector).items()}
    flat.vector.copy_(start)
    return before, after


CONDITIONS = {
    "the update": Condition(plain),
    "the relabelled model, compared index by index": Condition(relabelled),
    "the relabelled model, neurons matched first": Condition(aligned),
    "the update, clipped to norm 0.1": Condition(noisy(0.1, 0.0)),
    "the update, clipped to 0.1, noise multiplier 0.01": Condition(noisy(0.1, 0.01)),
    "the update, clipped to 0.1, noise multiplier 0.1": Condition(noisy(0.1, 0.1)),
    "the update, clipped to 0.1, noise multiplier 1": Condition(noisy(0.1, 1.0)),
    "the update, read off the first layer": Condition(plain, attack="row"),
    "features clipped to 1 and noised, deviation 0.1": Condition(plain, 1.0, 0.1),
    "features clipped to 1 and noised, deviation 1": Condition(plain, 1.0, 1.0),
    "the same, read off the first layer": Condition(plain, 1.0, 1.0, attack="row"),
    "clipped to 0.1, noise multiplier 0.1, read off the first layer": Condition(
        noisy(0.1, 0.1), attack="row"
    ),
    "first layer frozen: the update of the head": Condition(plain, frozen=True),
    "first layer frozen: the features that it tells": Condition(plain, None, 0.0, True, "features"),
    "the same, features clipped to 1 and noised, deviation 0.1": Condition(plain, 1.0, 0.1, True, "features"),
    "the same, features clipped to 1 and noised, deviation 1": Condition(plain, 1.0, 1.0, True, "features"),
}

if __name__ == "__main__":
    main(sys.argv[1])
