"""What a GPU would do, as far as a processor can do it: no look at a value between steps, steps that are
recorded and replayed, bfloat16 through group norms, weights with their channels last.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.learning import losses, private_training
from perennial.learning.batches import TrainingSet
from perennial.learning.private_training import train_privately
from perennial.learning.site_method import GradientCorrection
from perennial.learning.steps import GraphedSteps, Steps
from perennial.learning.training import TrainingResult, train
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.sample_level import PrivateGradient
from tests.seeded_noise import SeededNoise

aten = torch.ops.aten
LOOKS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default),
}
"""Operations whose answer a processor must have before it can go on."""
CLASSES = 4
PLAIN = AugmentationConfig()
MOVED = AugmentationConfig(crop_padding=1, flip=True)


class NoLook(TorchDispatchMode):
    """Fails where a GPU would be waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in LOOKS, f"{func} waits for the device"
        if func in (aten.index.Tensor, aten.index_put_.default):
            assert all(place is None or place.dtype == torch.int64 for place in args[1]), (
                f"{func} by truth values waits for the device"
            )
        return func(*args, **(kwargs or {}))


class WatchedSteps(Steps):
    """Steps in which nothing may be looked at. taken: how many there were."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, work: Callable[..., None], *inputs: Tensor, layout: Any = None) -> None:
        self.taken += 1
        with NoLook():
            work(*inputs)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the code asks which device it is on, it answers as on a GPU; one_hot looks at no label there."""

    def one_hot(labels: Tensor, classes: int) -> Tensor:
        return (labels[:, None] == torch.arange(classes)).long()

    def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
        return (values * chosen).sum() / chosen.sum()

    monkeypatch.setattr(losses, "_has_outside", lambda labels, first, end: False)
    monkeypatch.setattr(losses, "_mean_of", mean_of)
    monkeypatch.setattr(F, "one_hot", one_hot)


def learner(**changes: Any) -> LearnerConfig:
    settings = {
        "preset": "none",
        "epochs": 3,
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "classification": "ce",
    }
    return LearnerConfig.model_validate(settings | changes)


def samples(size: int, *, first: int = 0, seed: int = 3) -> TrainingSet:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (size, 3, 8, 8), generator=draw, dtype=torch.uint8)
    y = torch.randint(first, CLASSES, (size,), generator=draw)
    return TrainingSet(x, y, torch.full((3,), 0.5), torch.full((3,), 0.25))


def frozen(classes: int = 2) -> IncrementalModel:
    config = ModelConfig.model_validate({"name": "small_cnn"})
    return build_model(config, (3, 8, 8), classes, 2).eval().requires_grad_(False)


def small() -> IncrementalModel:
    return build_model(ModelConfig.model_validate({"name": "small_cnn"}), (3, 8, 8), CLASSES, 1)


def trained(
    config: LearnerConfig,
    data: TrainingSet,
    steps: Steps,
    model: IncrementalModel | None = None,
    **changes: Any,
) -> TrainingResult:
    model = small() if model is None else model
    flat = FlatParameters(model, config.channels_last)
    options: dict[str, Any] = {"augmentation": PLAIN} | changes
    return train(config, model, flat, data, np.random.default_rng(1), steps=steps, **options)


LEARNERS: dict[str, tuple[LearnerConfig, dict[str, Any]]] = {
    "softmax": (learner(), {}),
    "adam": (learner(optimizer={"name": "adam", "lr": 0.001}), {}),
    "bfloat16": (learner(precision="bfloat16"), {}),
    "channels last": (learner(channels_last=True), {}),
    "moved images": (learner(), {"augmentation": MOVED}),
    "balanced softmax": (learner(classification="balanced_softmax"), {}),
    "balanced memory": (learner(memory={"per_class": 2, "balanced": True}), {}),
    "gradient compensation": (learner(classification="gradient_compensation"), {"first_class": 2}),
    "icarl": (learner(classification="icarl_bce"), {"teacher": frozen()}),
    "distillation": (learner(distillation={}), {"teacher": frozen(), "augmentation": MOVED}),
    "relations": (learner(distillation={"form": "all_classes"}), {"teacher": frozen()}),
    "contrast": (learner(contrastive={"weight": 0.1}), {}),
    "correction": (learner(), {"correction": GradientCorrection(None, 0.1)}),
}


# Adam's number of steps is a number of the processor, or lies on the GPU where steps are recorded
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "adam"])
def test_no_step_waits_for_the_device(name: str) -> None:
    config, options = LEARNERS[name]
    steps = WatchedSteps()
    data = samples(21, first=options.get("first_class", 0) if "current" in name else 0)
    trained(config, replace(data, channels_last=config.channels_last), steps, **options)
    assert steps.taken == 9


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """What a graph does, by doing the work again; unlike a graph it does not freeze what Python decides."""
    return work


@pytest.mark.parametrize("name", LEARNERS)
def test_a_replayed_step_gives_the_same_bits(name: str) -> None:
    config, options = LEARNERS[name]
    data = replace(samples(21, first=2 if "current" in name else 0), channels_last=config.channels_last)
    plain = trained(config, data, Steps(), **options)
    calls: list[int] = []

    def recorder(work: Callable[[], None]) -> Callable[[], None]:
        calls.append(1)
        return work

    replayed = trained(config, data, GraphedSteps(lambda: recorder), **options)
    assert torch.equal(plain.update, replayed.update)
    assert (plain.loss, plain.steps) == (replayed.loss, replayed.steps)
    # batches of 8 and of 5 samples
    assert len(calls) == 2


def test_recordings_end_with_their_turn() -> None:
    kept: list[weakref.ref[Any]] = []

    class Recording:
        def __init__(self, work: Callable[[], None]) -> None:
            self.work = work
            kept.append(weakref.ref(self))

        def __call__(self) -> None:
            self.work()

    graphed = GraphedSteps(lambda: Recording)
    with graphed.turn() as steps:
        for _ in range(3):
            steps(lambda rows: None, torch.zeros(3))
        assert [each() is not None for each in kept] == [True]
    # the turn's own object may live on in the caller
    assert [each() for each in kept] == [None]
    assert steps.records


def test_what_cannot_be_recorded_runs_as_it_comes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def broken(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    data = samples(21)
    found = trained(learner(), data, GraphedSteps(lambda: broken))
    assert torch.equal(found.update, trained(learner(), data, Steps()).update)
    assert caplog.text.count("operation not permitted when stream is capturing") == 1
    assert "and more" not in caplog.text


def private_update(monkeypatch: pytest.MonkeyPatch, looks: bool) -> Tensor:
    privacy = PrivacyConfig.model_validate(
        {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 0.5, "sample_rate": 0.3, "delta": 1e-5}
    )

    class Chosen(PrivateGradient):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._looks = looks

        def compute(self, places: Tensor, losses: Any, patients: Tensor | None = None) -> Tensor:
            with no_look() if not looks else nothing():
                return super().compute(places, losses, patients)

    monkeypatch.setattr(private_training, "PrivateGradient", Chosen)
    model = small()
    source = SeededNoise(np.random.default_rng(4))
    flat = FlatParameters(model)
    config = learner(epochs=1)
    return train_privately(config, privacy, model, flat, samples(21), source, augmentation=PLAIN).update


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def no_look() -> Iterator[None]:
    with NoLook():
        yield


def test_no_step_of_dp_sgd_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> None:
    found, expected = private_update(monkeypatch, False), private_update(monkeypatch, True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
