"""Attacks of a server that lies on what is said to be a sum or a mean over many samples, and on masked sums.

A model that answers nothing but the brightest image makes a sum over twenty samples one over a single image,
so that no floor helps. Masked sums are opened by the real protocol, by a server that lies in the model alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.attacked_hospital import BASE, PIXELS, Hospital
from benchmarks.hostile_images import Outcome, first_layer, imprinted, matched, read_imprint
from benchmarks.twins.records import Records
from benchmarks.twins.world import Federation, Ran
from perennial.config.secure_words import UpdateWords, integers_of
from perennial.data.config import DataConfig
from perennial.data.digits import load_digits
from perennial.models.factory import build_model
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import (
    FinishTaskReply,
    FinishTaskRequest,
    SparsityReply,
    SparsityRequest,
    StatisticsReply,
    StatisticsRequest,
    TrainRequest,
)
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.tensors import Tensors
from perennial.server import global_model
from perennial.server.checkpoint import CHECKPOINT
from perennial.strategies.secure.store import SumStore
from perennial.strategies.statistics.noised import sums_form

ASKS = 4
"""Of one round, with the repeats that a policy allows by default."""
STEEP = 1e3
"""How much more brightness weighs than a pixel."""
MANY = 512
LEVELS = MANY // PIXELS


def brightest_of_class(hospital: Hospital) -> Outcome:
    """Sums of a class's exemplars under a model that is silent on all images but the brightest.

    A guess of the brightness for each time that the site answers.
    """
    images, last = hospital.images(), hospital.experiment.tasks.rounds
    assert isinstance(last, int)
    found = []
    for threshold in torch.linspace(0.1, 0.4, ASKS).tolist():
        arrays = hospital.arrays()
        weight, bias = first_layer(arrays)
        arrays[weight] = torch.eye(PIXELS) + STEEP / PIXELS
        arrays[bias] = torch.full((PIXELS,), -STEEP * threshold)
        reply = hospital.ask(FinishTaskRequest(**hospital.stamp(last), arrays=Tensors(arrays)))
        if isinstance(reply, FinishTaskReply) and reply.class_sums is not None:
            found.append(reply.class_sums["sums"])
    rows = torch.cat(found) if found else torch.empty(0, PIXELS)
    return Outcome(matched(rows, images), len(images), hospital.refusal)


def brightest_by_silence(hospital: Hospital, epsilon: float | None = None) -> Outcome:
    """How often units are silent: by brightness alone, twice, and then by brightness and one pixel each."""
    images, low, high = hospital.images(), -0.6 * STEEP, 0.6 * STEEP
    for _ in range(2):
        levels = torch.linspace(low, high, MANY)
        silent = _silent(hospital, torch.zeros(MANY, PIXELS), levels, epsilon)
        if silent is None or not bool((silent < 1).any()):
            return Outcome(0, len(images), hospital.refusal)
        # between the last level that an image passes and the next one
        last = int((silent < 1).nonzero()[-1])
        low, high = float(levels[last]), float(levels[min(last + 1, MANY - 1)])
    levels = torch.linspace(-0.8, 1.8, LEVELS).repeat(PIXELS)
    silent = _silent(hospital, torch.eye(PIXELS).repeat_interleave(LEVELS, dim=0), levels + low, epsilon)
    if silent is None:
        return Outcome(0, len(images), hospital.refusal)
    image = (silent < 1).view(PIXELS, LEVELS).sum(dim=1).double()
    return Outcome(matched(image[None], images), len(images), hospital.refusal)


def noised_by_silence(hospital: Hospital, epsilon: float = 10.0) -> Outcome:
    """The same under the noise that an epsilon asks for."""
    return brightest_by_silence(hospital, epsilon)


def _silent(hospital: Hospital, pixels: Tensor, above: Tensor, epsilon: float | None) -> Tensor | None:
    """(MANY,) share of samples on which each unit is silent. pixels: (MANY, 64), beside the brightness."""
    arrays = hospital.arrays()
    weight = next(name for name, tensor in arrays.items() if tensor.shape == (MANY, PIXELS))
    arrays[weight] = pixels + STEEP / PIXELS
    arrays[weight.removesuffix("weight") + "bias"] = -above
    reply = hospital.ask(
        SparsityRequest(
            **hospital.stamp(),
            arrays=Tensors(arrays),
            network="model",
            channels=list(range(MANY)),
            layers=1,
            combine="average",
            epsilon=epsilon,
            delta=None if epsilon is None else 1e-5,
        )
    )
    return reply.vector["sparsity"] if isinstance(reply, SparsityReply) else None


def sums_of_one(hospital: Hospital) -> Outcome:
    """Sums of features that are the pixels; of a class with one sample they are its image."""
    images = hospital.images()
    features = hospital.site.models.fixed_features()
    reply = hospital.ask(StatisticsRequest(**hospital.stamp(), of_task=1, features=features.content))
    if not isinstance(reply, StatisticsReply):
        return Outcome(0, len(images), hospital.refusal)
    return Outcome(matched(reply.statistics["sums"][:, :PIXELS], images), len(images), hospital.refusal)


def masked_update(folder: Path, **changes: Any) -> Outcome:
    """The opened sum of three sites' updates under an imprinted model."""
    federation, failed = _lied_to(folder, changes)
    images, opened = _images(federation), opened_words(federation, "update")
    if opened is None:
        return Outcome(0, len(images), failed or "no sum was opened")
    return Outcome(matched(read_imprint(_values(federation, opened)), images), len(images), "")


def masked_words(folder: Path, **changes: Any) -> Outcome:
    """The words that one site sent into that sum, read as if they were its update."""
    federation = three_sites(folder, changes, of_each=20)
    ran = _run_with_lies(federation)
    images, found = _images(federation), 0
    for answer in ran.answers:
        if answer.reply is not None and read_kind(answer.reply) == "MaskedReply":
            words = MaskedReply.from_record(answer.reply).words["words"].numpy().view(np.uint64)
            found += matched(read_imprint(_values(federation, words)), images)
    return Outcome(found, len(images), ran.failed)


def model_difference(folder: Path, **changes: Any) -> Outcome:
    """What another site sees: an imprinted model, and the model after a round of three sites."""
    federation = three_sites(
        folder, {"secure": None, "tasks": {"count": 1, "rounds": 2, "order": "natural"}} | changes, of_each=20
    )
    ran = _run_with_lies(federation)
    images = _images(federation)
    models = [
        TrainRequest.from_record(answer.request).arrays
        for answer in ran.answers
        if read_kind(answer.request) == "TrainRequest"
    ]
    if len(models) < 2:
        return Outcome(0, len(images), ran.failed or "there was one round")
    change = {name: models[-1][name].double() - models[0][name] for name in models[0]}
    return Outcome(matched(read_imprint(change), images), len(images), "")


def _lied_to(folder: Path, changes: Mapping[str, Any]) -> tuple[Federation, str]:
    federation = three_sites(folder, changes, of_each=20)
    return federation, _run_with_lies(federation).failed


def _run_with_lies(federation: Federation) -> Ran:
    """Run a server whose first model is imprinted, and that keeps to the protocol in all else."""
    build = build_model

    def lying(*values: Any, **keys: Any) -> Any:
        model = build(*values, **keys)
        state = model.state_dict()
        floats = {name: tensor.clone() for name, tensor in state.items() if tensor.is_floating_point()}
        model.load_state_dict(state | imprinted(floats))
        return model

    with patch.object(global_model, "build_model", lying):
        (ran,) = federation.recorded(copies=False)
    return ran


def _values(federation: Federation, words: Any) -> dict[str, Tensor]:
    """Words of an update as tensors."""
    experiment = federation.experiment()
    model = build_model(experiment.model, (1, 8, 8), 5, experiment.seed)
    like = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return UpdateWords(experiment, 3).decode(words, like)[0]


def masked_sums(folder: Path, **changes: Any) -> Outcome:
    """The opened sums of three sites' features, which are pixels, with one sample of each class in all."""
    federation = three_sites(folder, changes, of_each=1)
    (ran,) = federation.recorded(copies=False)
    images = _images(federation)
    opened = opened_words(federation, "statistics")
    if opened is None:
        return Outcome(0, len(images), ran.failed or "no sum was opened")
    privacy = federation.experiment().privacy
    constant = 0 if privacy.enabled else 1
    width = PIXELS + constant
    shapes = (
        sums_form(PIXELS, privacy).shapes(5).values()
        if privacy.enabled
        else ((width * (width + 1) // 2,), (5, width), (5,))
    )
    sums = integers_of(opened, *shapes)[1]
    return Outcome(matched(sums[:, :PIXELS].double(), images), len(images), "")


def three_sites(folder: Path, changes: Mapping[str, Any], *, of_each: int) -> Federation:
    """Digits at three sites; of_each: of a class at a site, or one of each class in all."""
    source = load_digits(DataConfig(source="digits"))
    x, y = source.train.x[:, 0].numpy(), source.train.y.numpy()
    data: dict[str, Records] = {}
    for site in range(3):
        rows = [
            row
            for label in range(5)
            if of_each > 1 or label % 3 == site
            for row in np.flatnonzero(y == label)[site * of_each : (site + 1) * of_each]
        ]
        names = np.array([f"c{y[row]}" for row in rows])
        # a site without a sample of the task would take no part
        data[f"site-{site}"] = Records(x[rows], names)
    settings = {key: value for key, value in BASE.items() if key != "data"} | {
        "tasks": {"count": 1, "rounds": 1, "order": "natural"},
        "data": {
            "source": "folder",
            "classes": [f"c{label}" for label in range(5)],
            "image_size": 8,
            "color": "gray",
            "normalise": {"mean": 0.3, "std": 0.38},
            "test_fraction": 0,
            "validation_fraction": 0,
        },
        "secure": {"least": 3, "quorum": 3, "assumed_colluders": 0},
        "evaluation": {"central": False, "federated": False},
    }
    whole = {key: value for key, value in (settings | dict(changes)).items() if value is not None}
    return Federation(folder, whole, data)


def _images(federation: Federation) -> Tensor:
    held = federation.data.values()
    return torch.cat([torch.from_numpy(records.x).flatten(1).double() for records in held])


def opened_words(federation: Federation, statistic: str) -> Any:
    place = federation.folder / "runs" / "run" / CHECKPOINT
    for path in sorted((place / "secure").glob("opened-*.json")):
        facts = json.loads(path.read_bytes())
        if facts["statistic"] == statistic:
            return SumStore(place).all_opened(statistic, facts["model"])[0].words
    return None
