"""Links the models of a ring's hand-overs to each other although hidden neurons are permuted on the way.

The ring's turns are taken again from the run's final model. The adversary holds models from before some turns
and models from after them, in no order: the sites before and after a site in the ring have such a pair.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.config.experiment import Experiment
from perennial.data.federation import SimulatedFederation
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.training import train
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.models.networks import SECNN, MultilayerPerceptron, SmallCNN
from perennial.models.relabel import relabel
from perennial.models.saved import SavedModel
from perennial.privacy.attacks.linkage import Layers, align, link_models
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import SeededNoise
from perennial.privacy.protection import protect_update
from perennial.server.attacks.pictures import REFERENCE
from perennial.strategies.factory import build_strategy
from perennial.strategies.serial_ring import SerialRing

PAIRS = 5
BETWEEN = 3
"""Turns from one pair to the next, so that no model is in two pairs."""


def ring_linkage(
    saved: SavedModel, experiment: Experiment, federation: SimulatedFederation
) -> dict[str, Any] | None:
    """Attack the hand-overs of a ring; returns the report's entry, or None if the run has none to attack."""
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    if strategy.find(SerialRing) is None or not _is_chain(saved.model):
        return None
    privacy = experiment.privacy
    hidden = privacy if privacy.mode == "client_local" and privacy.noise_multiplier else REFERENCE
    figures: dict[str, Any] = {"pairs": PAIRS, "guessing": 1 / PAIRS}
    for kind, protection in (("in_the_clear", None), ("protected", hidden)):
        turns = _turns(saved, experiment, federation, protection)
        order = stream(experiment.seed, "attack-link").permutation(PAIRS).tolist()
        befores, shuffled = [turn.before for turn in turns], [turns[place].after for place in order]
        for way, matching in (("index_by_index", False), ("neurons_matched", True)):
            linked = link_models(befores, shuffled, matching=matching).tolist()
            right = sum(found == true for found, true in zip(linked, order, strict=True))
            figures[f"linked_{way}_{kind}"] = right / PAIRS
            likeness = [turn.likeness_of_update(matching=matching) for turn in turns]
            figures[f"update_cosine_{way}_{kind}"] = sum(likeness) / PAIRS
    figures |= {"clip_norm": hidden.clip_norm, "noise_multiplier": hidden.noise_multiplier}
    name = "Linkage of successive ring models, and what it shows of a site's update"
    return {"name": name, "figures": figures}


@dataclass(frozen=True)
class _Turn:
    """Weights before a turn and as handed on after it, and the site's own change of them, (P,)."""

    before: Layers
    after: Layers
    update: Tensor

    def likeness_of_update(self, *, matching: bool) -> float:
        """Cosine of the difference that the adversary computes and the true update."""
        after = align(self.before, self.after) if matching else self.after
        return float(F.cosine_similarity(_flat(after) - _flat(self.before), self.update, dim=0))


def _is_chain(model: IncrementalModel) -> bool:
    """Whether each layer feeds the next one alone, which is what matching takes."""
    backbone = model.backbone
    if type(model) is not IncrementalModel:
        return False
    if isinstance(backbone, SmallCNN | SECNN):
        return backbone.attention is None
    return isinstance(backbone, MultilayerPerceptron)


def _turns(
    saved: SavedModel,
    experiment: Experiment,
    federation: SimulatedFederation,
    protection: PrivacyConfig | None,
) -> list[_Turn]:
    """PAIRS turns, each with others between it and the next one."""
    classes = len(saved.classes)
    model = build_model(experiment.model, saved.inputs.shape, classes, experiment.seed)
    model.load_state_dict(saved.model.state_dict())
    flat = FlatParameters(model)
    sites = list(federation.sites.items())
    found = []
    for turn in range(PAIRS * BETWEEN):
        name, site = sites[turn % len(sites)]
        data = TrainingSet(site.x[site.train], site.y[site.train], site.mean, site.std)
        start = flat.vector.clone()
        before = _layers(flat, start)
        generator = stream(experiment.seed, "attack-ring", name, turn)
        update = train(
            experiment.learner, model, flat, data, generator, augmentation=experiment.data.augmentation
        ).update
        own = _flat(_layers(flat, update))
        if protection is not None:
            assert protection.clip_norm is not None and protection.noise_multiplier is not None
            source = SeededNoise(stream(experiment.seed, "attack-ring-noise", turn))
            protect_update(update, protection.clip_norm, protection.noise_multiplier, source)
        flat.vector.copy_(start + update)
        relabel(model, stream(experiment.seed, "attack-relabel", turn))
        if turn % BETWEEN == 0:
            found.append(_Turn(before, _layers(flat, flat.vector), own))
    return found


def _layers(flat: FlatParameters, vector: Tensor) -> list[Tensor]:
    """Copies of the weights in vector, from the input to the classifier."""
    return [view.clone() for view in flat.views(vector).values() if view.dim() > 1]


def _flat(layers: Layers) -> Tensor:
    return torch.cat([weight.reshape(-1) for weight in layers])
