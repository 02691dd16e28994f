"""What a GPU would do, as far as a processor can do it: no look at a value between steps, steps that are
recorded and replayed, bfloat16 through group norms, weights with their channels last.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from perennial.client.identity import Identity
from perennial.config.experiment import load_experiment
from perennial.config.learner import LearnerConfig
from perennial.config.site import load_site_config
from perennial.data.augmentation import augment, draw_moves, moved
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import ConfigError
from perennial.learning import classification, private_training
from perennial.learning.batches import TrainingSet, shuffled
from perennial.learning.cohort_training import Member, train_cohort
from perennial.learning.precision import autocast, use_products_of
from perennial.learning.private_training import train_privately
from perennial.learning.site_method import GradientCorrection
from perennial.learning.steps import GraphedSteps, Steps, gpu_options, prepare_gpu
from perennial.learning.training import TrainingResult, train
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state
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

    monkeypatch.setattr(classification, "_beyond", lambda labels, first, end: False)
    monkeypatch.setattr(classification, "_mean_of", mean_of)
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


def network(norm: str = "group") -> IncrementalModel:
    config = ModelConfig.model_validate({"name": "resnet18", "norm": norm})
    return build_model(config, (3, 8, 8), CLASSES, 1)


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
    "current softmax": (learner(classification="current_softmax"), {"first_class": 2}),
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


def test_a_look_is_seen() -> None:
    with NoLook(), pytest.raises(AssertionError, match="waits for the device"):
        bool(torch.ones(2).all())
    values = torch.ones(2)
    with NoLook(), pytest.raises(AssertionError, match="truth values"):
        values[values > 0]


def test_no_step_of_a_cohort_waits_for_the_device(as_on_a_gpu: None) -> None:
    model, config = small(), learner(distillation={}, contrastive={"weight": 0.1})
    flat = FlatParameters(model)
    members = [
        Member(samples(size, seed=size), flat.vector.clone(), np.random.default_rng(size)) for size in (21, 8)
    ]
    steps = WatchedSteps()
    train_cohort(config, model, flat, members, teacher=frozen(), augmentation=PLAIN, steps=steps)
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


def test_a_replayed_step_of_a_cohort_gives_the_same_bits() -> None:
    config = learner(epochs=4)
    updates = []
    for steps in (Steps(), GraphedSteps(lambda: recorded)):
        model = small()
        flat = FlatParameters(model)
        members = [
            Member(samples(size, seed=size), flat.vector.clone(), np.random.default_rng(size))
            for size in (21, 16, 5)
        ]
        found = train_cohort(config, model, flat, members, augmentation=PLAIN, steps=steps)
        updates.append(torch.stack([each.update for each in found]))
    assert torch.equal(*updates)


def test_what_cannot_be_recorded_runs_as_it_comes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def broken(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    data = samples(21)
    found = trained(learner(), data, GraphedSteps(lambda: broken))
    assert torch.equal(found.update, trained(learner(), data, Steps()).update)
    assert caplog.text.count("operation not permitted when stream is capturing") == 1
    assert "and more" not in caplog.text


def test_a_term_that_draws_its_own_samples_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    steps = GraphedSteps(lambda: recorded)
    with steps.turn("it draws anew") as carry_out:
        assert not carry_out.records
    with steps.turn("it draws anew"):
        pass
    assert caplog.text.count("it draws anew") == 1


def test_options_of_a_gpu_are_refused_on_a_processor() -> None:
    with pytest.raises(ConfigError, match=r"gpu: found 'graphs' on device cpu"):
        prepare_gpu("graphs", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"gpu: found 'speed', allowed graphs, benchmark"):
        prepare_gpu("speed,graphs", torch.device("cpu"))
    assert type(prepare_gpu("", torch.device("cpu"))) is Steps


def test_a_gpu_is_deterministic_unless_it_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "deterministic"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    try:
        prepare_gpu("benchmark", torch.device("cuda"))
        assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
        assert not torch.are_deterministic_algorithms_enabled()
        prepare_gpu("", torch.device("cuda"))
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_site_says_what_its_gpu_may_do(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: site-0\nstate_dir: state\ngpu: [graphs, benchmark]\n")
    identity = Identity.of_site(load_site_config(path), load_experiment(Path("experiments/quickstart.yaml")))
    assert gpu_options(identity.gpu) == {"graphs", "benchmark"}
    path.write_text("site: linz\nstate_dir: state\ngpu: [speed]\n")
    with pytest.raises(ConfigError, match=r"gpu.0: .*'graphs' or 'benchmark'"):
        load_site_config(path)


def test_group_norm_takes_bfloat16_as_it_comes() -> None:
    seen: list[torch.dtype] = []
    model = network()
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_hook(
                lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype])
            )
    with autocast(learner(precision="bfloat16"), torch.device("cpu")):
        logits = model(torch.rand(2, 3, 8, 8))
    assert set(seen) == {torch.bfloat16}
    # many of 8 bits would be equal
    assert logits.dtype == torch.float32


def test_products_are_exact_unless_the_learner_says_otherwise() -> None:
    found = []
    for precision in ("tf32", "bfloat16", "float32"):
        use_products_of(learner(precision=precision))
        found.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
    assert found == [(True, True), (False, False), (False, False)]


def test_weights_with_their_channels_last_train_the_same_model() -> None:
    data = samples(21)
    plain, last = network(), network()
    one, other = FlatParameters(plain), FlatParameters(last, channels_last=True)
    weight = last.get_parameter("backbone.layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    other.gradient.zero_()
    assert weight.grad is not None and weight.grad.stride() == weight.stride()
    for found, expected in zip(
        other.views(other.vector).values(), one.views(one.vector).values(), strict=True
    ):
        assert torch.equal(found, expected)
    rows = torch.stack([other.vector, 2 * other.vector])
    assert torch.equal(other.row_major(rows)[0], one.vector)
    assert torch.equal(other.as_stored(other.row_major(rows)), rows)
    assert torch.equal(other.flatten(complete_state(plain)), other.vector)
    a = train(learner(), plain, one, data, np.random.default_rng(1), augmentation=PLAIN)
    inputs = replace(data, channels_last=True)
    b = train(learner(), last, other, inputs, np.random.default_rng(1), augmentation=PLAIN)
    for name, found in other.views(b.update).items():
        torch.testing.assert_close(found, one.views(a.update)[name], rtol=1e-3, atol=1e-5)


def test_a_cohort_takes_and_gives_weights_with_their_channels_last() -> None:
    model, config = small(), learner(epochs=1)
    plain, last = FlatParameters(model), FlatParameters(small(), channels_last=True)
    shift = torch.rand(len(plain.trainable), generator=torch.Generator().manual_seed(1)) / 100
    found = []
    for flat in (plain, last):
        own = shift if flat is plain else flat.as_stored(shift[None])[0]
        members = [
            Member(
                samples(16, seed=seed),
                flat.vector.clone(),
                np.random.default_rng(seed),
                GradientCorrection(own),
            )
            for seed in (1, 2)
        ]
        found.append(train_cohort(config, model, flat, members, augmentation=PLAIN))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.update, last.row_major(b.update[None])[0])
        assert torch.equal(a.end, last.row_major(b.end[None])[0])


def test_moves_are_the_same_however_many_batches_are_moved_at_once() -> None:
    x = samples(21).x
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    parts = torch.cat([augment(part, MOVED, one) for part in x.split(8)])
    assert torch.equal(parts, moved(x, MOVED, draw_moves([8, 8, 5], MOVED, other, x.device)))


def test_an_epoch_is_the_same_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def epoch() -> list[Tensor]:
        return [inputs for _, inputs, _ in shuffled(samples(40), 8, np.random.default_rng(2), MOVED)]

    whole = epoch()
    monkeypatch.setattr("perennial.learning.batches.CONVERTED_VALUES", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, epoch(), strict=True))


def private_update(monkeypatch: pytest.MonkeyPatch, looks: bool) -> Tensor:
    privacy = PrivacyConfig.model_validate(
        {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 0.5, "sample_rate": 0.3, "delta": 1e-5}
    )

    class Chosen(PrivateGradient):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._looks = looks

        def compute(self, batch: int, losses: Any, patients: Tensor | None = None) -> Tensor:
            with no_look() if not looks else nothing():
                return super().compute(batch, losses, patients)

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
