"""A server that wants patients' images: programs that attack a real ClientApp at a site with a site.yaml.

Each attack is written for a site that answers everything, and says how many images it got back. The hospital
is that of `attacked_hospital`; tests/redteam runs the attacks.

Symbols: n training samples of the site, images of 64 pixels (scikit-learn's digits).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.config.experiment import load_experiment
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import (
    DigestReply,
    DigestRequest,
    EvaluateReply,
    EvaluateRequest,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import BASE, PIXELS, POLICIES, Hospital

ALIKE = 0.98
"""Correlation from which a reconstruction counts as the image."""
LEVELS = 16
"""Of brightness."""
SAMPLE = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1}


@dataclass(frozen=True)
class Outcome:
    """What an attack came to. refusal: the first, '' without one."""

    recovered: int
    of: int
    refusal: str


def matched(found: Tensor, images: Tensor) -> int:
    """How many of the images (n, 64) some row of found (k, 64) shows."""
    if len(found) == 0:
        return 0
    rows = [_standard(tensor.double()) for tensor in (images, found)]
    return int(((rows[0] @ rows[1].T / PIXELS).max(dim=1).values > ALIKE).sum())


def _standard(rows: Tensor) -> Tensor:
    spread = rows.std(dim=1, correction=0, keepdim=True)
    return torch.where(spread > 0, (rows - rows.mean(dim=1, keepdim=True)) / spread, 0.0)


def first_layer(arrays: Mapping[str, Tensor]) -> tuple[str, str]:
    """Names of the first layer's weight and bias."""
    weight = next(name for name, tensor in arrays.items() if tensor.shape == (PIXELS, PIXELS))
    return weight, weight.removesuffix("weight") + "bias"


def head(arrays: Mapping[str, Tensor]) -> tuple[str, str]:
    weight = [name for name, tensor in arrays.items() if tensor.dim() == 2][-1]
    return weight, weight.removesuffix("weight") + "bias"


def imprinted(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model whose neurons sort images by brightness; neighbours differ by one image.

    Fowl et al. 2022 (arXiv 2110.13057).
    """
    weight, bias = first_layer(arrays)
    last, last_bias = head(arrays)
    arrays[weight] = torch.full((PIXELS, PIXELS), 1 / PIXELS)
    arrays[bias] = -torch.linspace(-0.4, 0.4, PIXELS)
    arrays[last] = torch.linspace(-1, 1, len(arrays[last]))[:, None].expand(-1, PIXELS).clone() / PIXELS
    arrays[last_bias] = torch.zeros_like(arrays[last_bias])
    return arrays


def read_imprint(update: Mapping[str, Tensor]) -> Tensor:
    """(k, 64) what lies between neighbouring neurons of an update of imprinted()."""
    weight, bias = first_layer(update)
    rows = update[weight].double().diff(dim=0)
    scale = update[bias].double().diff()[:, None]
    return rows[scale.flatten().abs() > 1e-12]


@dataclass(frozen=True)
class Attack:
    """An attack, and the experiment in which it is possible.

    changes: of the experiment that the hospital has approved.
    run: the program.
    """

    channel: str
    changes: Mapping[str, Any]
    run: Callable[[Hospital], Outcome]


def imprint(hospital: Hospital) -> Outcome:
    """One update of an imprinted model."""
    reply = hospital.ask(TrainRequest(**hospital.stamp(), arrays=Tensors(imprinted(hospital.arrays()))))
    images = hospital.images()
    if not isinstance(reply, TrainReply):
        return Outcome(0, len(images), hospital.refusal)
    return Outcome(matched(read_imprint(reply.update), images), len(images), hospital.refusal)


def segments(hospital: Hospital) -> Outcome:
    """A ring whose segments have one sample each: every update is one image times a number."""
    images = hospital.images()
    arrays = hospital.arrays()
    weight, bias = first_layer(arrays)
    # every neuron sees every image, and what is added to nothing is exact
    arrays[weight], arrays[bias] = torch.zeros_like(arrays[weight]), torch.ones_like(arrays[bias])
    keys = hospital.experiment.strategy.parameters
    found = []
    for sweep in range(1, keys["segments"] + 1):
        turn = {"sweep": sweep, "segments": keys["segments"]}
        request = TrainRequest(
            **hospital.stamp(), arrays=Tensors(arrays), settings=json.dumps({"turn": turn})
        )
        reply = hospital.ask(request)
        if not isinstance(reply, TrainReply):
            break
        change = reply.update[bias]
        neuron = int(change.abs().argmax())
        if float(change[neuron]):
            found.append(reply.update[weight][neuron] / change[neuron])
    rows = torch.stack(found) if found else torch.empty(0, PIXELS)
    return Outcome(matched(rows, images), len(images), hospital.refusal)


def counted_pixels(hospital: Hospital, attempt: int = 0) -> Outcome:
    """Reconstructs a held-out image pixel by pixel from counts of right answers.

    Each model is right on one class if one pixel is above a level, so that the count, when the class has one
    sample, is an answer about that pixel. The first answer shows which class that is. Another attempt asks
    about other models: the same question would get the same answer, noise and all.
    """
    data = hospital.site.data
    images = torch.cat([hospital.images("test"), hospital.images("validation")])
    last = hospital.experiment.tasks.rounds
    assert isinstance(last, int)
    mean, std = float(data.mean.flatten()[0]), float(data.std.flatten()[0])

    def counts(pixel: int, level: float, target: int) -> EvaluateReply | None:
        model = threshold(hospital.arrays(), pixel, ((level + attempt / 100) / LEVELS - mean) / std, target)
        reply = hospital.ask(EvaluateRequest(**hospital.stamp(last), arrays=Tensors(model)))
        return reply if isinstance(reply, EvaluateReply) else None

    first = counts(0, 0.5, 0)
    if first is None or 1 not in first.total:
        return Outcome(0, 1, hospital.refusal or "policy.min_samples: no class with one sample is told")
    target = first.total.index(1)
    image = torch.zeros(PIXELS)
    for pixel in range(PIXELS):
        low, high = 0, LEVELS
        while low < high:
            middle = (low + high) // 2
            reply = counts(pixel, middle + 0.5, target)
            if reply is None:
                return Outcome(0, 1, hospital.refusal)
            low, high = (middle + 1, high) if reply.correct[target] else (low, middle)
        image[pixel] = low
    return Outcome(min(1, matched(image[None], images)), 1, hospital.refusal)


def threshold(arrays: dict[str, Tensor], pixel: int, level: float, label: int) -> dict[str, Tensor]:
    """A model that calls everything `label` whose pixel is above a level, and the next class otherwise."""
    weight, bias = first_layer(arrays)
    last, last_bias = head(arrays)
    for name in (weight, bias, last, last_bias):
        arrays[name] = torch.zeros_like(arrays[name])
    arrays[weight][0, pixel], arrays[bias][0] = 1.0, -level
    arrays[last][label, 0] = 1e6
    arrays[last_bias][(label + 1) % len(arrays[last_bias])] = 1e-3
    return arrays


def digests(hospital: Hospital) -> Outcome:
    """Digests of one sample each: the features of that sample, as the fixed encoder gives them."""
    from perennial.models.digest_networks import FeatureEncoder, hash_encoder

    encoder = FeatureEncoder((1, 8, 8), hospital.experiment.seed)
    reply = hospital.ask(DigestRequest(**hospital.stamp(), encoder=hash_encoder(encoder)))
    images = hospital.images()
    if not isinstance(reply, DigestReply) or reply.digests is None:
        return Outcome(0, len(images), hospital.refusal or "policy.answers: lends no digests")
    site = hospital.site
    indices = site.data.find_task_indices("train", 0, hospital.stamp()["num_classes"])
    features = encoder(site.samples(indices).inputs(slice(None))).flatten(1)
    nearest = _distances(features, reply.digests["features"].flatten(1)).min(dim=1).values
    return Outcome(int((nearest < 1e-3).sum()), len(images), hospital.refusal)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")


def overrides(hospital: Hospital) -> Outcome:
    """An approved experiment in mode sample, submitted with overrides that take the protection away."""
    plain = replace_settings(hospital, "privacy={mode: none}")
    return Outcome(plain.recovered, plain.of, plain.refusal)


def replace_settings(hospital: Hospital, changed: str) -> Outcome:
    """imprint(), with the run config's overrides."""

    class Other(Hospital):
        def __init__(self) -> None:
            self.__dict__ = dict(vars(hospital))
            self.experiment = load_experiment(hospital.file, [changed])

        def ask(self, request: WireMessage, **run_config: str) -> WireMessage | None:
            return super().ask(request, overrides=changed, **run_config)

    return imprint(Other())


RING = {"name": "serial_ring", "segments": 29, "relabel": "none"}
OF_THE_RING = BASE["data"] | {"samples_limit": 100}
ONE_TASK = {"tasks": {"count": 1, "rounds": 2}}
ATTACKS = {
    "settings of the run": Attack(
        "run config", {"privacy": SAMPLE, "evaluation": {"federated": False}}, overrides
    ),
    "update, imprinted model": Attack("update", {}, imprint),
    "update in mode sample, imprinted model": Attack(
        "update", {"privacy": SAMPLE, "evaluation": {"federated": False}}, imprint
    ),
    "update in mode sample without noise to speak of": Attack(
        "update",
        {
            "privacy": {"mode": "sample", "clip_norm": 1e6, "noise_multiplier": 1e-12, "sample_rate": 1.0},
            "evaluation": {"federated": False},
        },
        imprint,
    ),
    "update cut to 1e6 in mode client_central": Attack(
        "update",
        {
            "privacy": {"mode": "client_central", "clip_norm": 1e6, "noise_multiplier": 1.0},
            "evaluation": {"federated": False},
        },
        imprint,
    ),
    "ring, one sample a segment": Attack(
        "update", ONE_TASK | {"strategy": RING, "data": OF_THE_RING}, segments
    ),
    "counts, pixel by pixel": Attack(
        "evaluate", {"data": BASE["data"] | {"test_fraction": 0.02}}, counted_pixels
    ),
    "digests of one sample": Attack(
        "digest",
        {
            "digests": {"per_digest": 1},
            "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
            "strategy": {"name": "digest_synthesis", "base": "fedavg"},
        },
        digests,
    ),
}


def attacked(name: str, policy: str, folder: Path) -> Outcome:
    """One attack on a new hospital with one policy."""
    attack = ATTACKS[name]
    return attack.run(Hospital(folder, POLICIES[policy], **attack.changes))
