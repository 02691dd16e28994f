"""GLFC: when a site sees new classes, what it sends, what the server makes of it and chooses by it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from perennial.baselines.glfc import Glfc
from perennial.client.prototypes import (
    mean_entropy,
    perturbed_prototype,
    prototype_gradients,
    sees_transition,
)
from perennial.client.site import Site
from perennial.client.state import SiteState
from perennial.config.site import SitePolicy
from perennial.data.schedule import TaskSchedule
from perennial.foundation.errors import ConfigError, DataError, PrivacyError, ProtocolError
from perennial.learning.batches import TrainingSet
from perennial.models.gradient_encoder import GradientEncoder
from perennial.models.incremental import IncrementalModel
from perennial.privacy.attacks.gradient_inversion import invert_gradient
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import TaskStart
from perennial.strategies.round.run_context import RunContext
from tests.rounds import begun

SHAPE = (1, 8, 8)
ORDER = {"prototypes": {"noise": 0.0, "entropy_rise": 0.2}}
STAMP = {"run": "r", "experiment": "e", "class_order": "c", "task": 1, "num_classes": 2}


class Brightness(nn.Module):
    """Class 1 where an image is bright on the whole, times a slope."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        bright = self.slope * x.flatten(1).mean(dim=1, keepdim=True)
        return torch.cat([-bright, bright], dim=1)


def images(labels: list[int]) -> TrainingSet:
    """A bright half, on the left or on the right by class, and some noise; (n, 1, 8, 8) of 8 bits."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randint(0, 60, (len(labels), *SHAPE), generator=draw)
    for row, label in enumerate(labels):
        x[row, :, :, 4 * label : 4 * label + 4] += 180
    return TrainingSet(x.to(torch.uint8), torch.tensor(labels), torch.tensor([0.5]), torch.tensor([0.5]))


def site(folder: Path, data: TrainingSet, enabled: bool = False) -> Site:
    experiment = SimpleNamespace(seed=1, privacy=SimpleNamespace(enabled=enabled))
    state = SiteState(folder / "state", "a")
    made = SimpleNamespace(
        name="a",
        experiment=experiment,
        identity=SimpleNamespace(policy=SitePolicy(below_floor=["prototypes"])),
        models=SimpleNamespace(input_shape=SHAPE),
        state=lambda run: state,
        samples=lambda indices: data,
    )
    return cast(Site, made)


def request(number: int = 1, settings: dict[str, Any] = ORDER) -> TrainRequest:
    return TrainRequest(**STAMP, round=number, arrays=Tensors(), settings=json.dumps(settings))


def sent(folder: Path, number: int = 1, **more: Any) -> Tensors | None:
    data = more.pop("data", images([0, 1, 0, 1]))
    settings = more.pop("settings", ORDER)
    model = cast(IncrementalModel, Brightness())
    indices = torch.arange(len(data))
    return prototype_gradients(site(folder, data, **more), request(number, settings), model, indices)


def test_a_gradient_gives_its_image_back() -> None:
    image = images([1]).x[0].float() / 255
    encoder = GradientEncoder(SHAPE, 2, seed=1)
    gradient = encoder.gradient(image, 1)
    assert int(gradient["head.bias"].argmin()) == 1
    made = invert_gradient(
        encoder, gradient, SHAPE, torch.Generator().manual_seed(1), labels=torch.tensor([1]), steps=150
    )
    both = torch.stack([made.images.flatten(), image.flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.9


def test_a_prototype_is_the_sample_nearest_to_the_mean_of_its_class() -> None:
    data = images([0, 0, 0, 1])
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7], [9.0, 9.0]])
    draw = torch.Generator().manual_seed(1)
    assert torch.equal(perturbed_prototype(data, features, 0, 0.0, draw), data.x[2].float() / 255)
    noisy = perturbed_prototype(data, features, 0, 0.5, draw)
    assert not torch.equal(noisy, data.x[2].float() / 255)
    assert float(noisy.min()) >= 0 and float(noisy.max()) <= 1


def test_entropy_by_hand() -> None:
    data = images([0, 1])
    flat = cast(IncrementalModel, Brightness(0.0))
    assert mean_entropy(flat, data) == pytest.approx(0.6931472, abs=1e-6)
    sure = cast(IncrementalModel, Brightness(1e4))
    assert mean_entropy(sure, data) == pytest.approx(0.0, abs=1e-4)


def test_a_rise_of_entropy_is_a_transition_and_a_repeated_round_sees_it_again(tmp_path: Path) -> None:
    here = site(tmp_path, images([0]))
    seen = [sees_transition(here, request(n), h, 0.2) for n, h in enumerate([1.0, 0.5, 0.69, 0.9, 0.9], 1)]
    assert seen == [True, False, False, True, False]
    assert sees_transition(here, request(4), 0.9, 0.2)


def test_a_site_sends_one_gradient_for_each_class_once(tmp_path: Path) -> None:
    first = sent(tmp_path)
    assert first is not None
    expected = {f"prototypes/{name}" for name, _ in GradientEncoder(SHAPE, 2, 1).named_parameters()}
    assert first.keys() == expected
    assert first["prototypes/head.bias"].shape == (2, 2)
    assert sorted(first["prototypes/head.bias"].argmin(dim=1).tolist()) == [0, 1]
    assert sent(tmp_path, 2) is None
    assert sent(tmp_path, 3, settings={}) is None


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="give back the samples"):
        sent(tmp_path, enabled=True)
    table = TrainingSet(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(3), torch.ones(3))
    with pytest.raises(DataError, match="images of 8 bits"):
        sent(tmp_path, data=table)
    with pytest.raises(ProtocolError, match=r"settings\.prototypes\.noise: found -1\.0"):
        sent(tmp_path, settings={"prototypes": {"noise": -1.0, "entropy_rise": 0.2}})


def strategy(begun: bool = True, **keys: Any) -> Glfc:
    made = Glfc(**{"steps": 30, **keys})
    experiment = SimpleNamespace(
        seed=1, privacy=SimpleNamespace(mode="none"), lead_rounds=lambda task: 1 if task == 1 else 0
    )

    def load(arrays: dict[str, Tensor]) -> nn.Module:
        return Brightness(float(arrays["slope"])).eval()

    made.attach(
        cast(
            RunContext,
            SimpleNamespace(
                experiment=experiment,
                input_shape=SHAPE,
                constants=(torch.tensor([0.5]), torch.tensor([0.5])),
                device=torch.device("cpu"),
                schedule=TaskSchedule((0, 2, 4), (2, 3)),
                load=load,
                sums=None,
            ),
        )
    )
    if begun:
        made.begin_task(TaskStart(1, 2, range(2), {}, ("a",)))
    return made


def bright_and_dark() -> dict[str, Tensor]:
    """Gradients of an all but white image of class 1 and an all but black one of class 0."""
    encoder = GradientEncoder(SHAPE, 2, 1)
    pair = [encoder.gradient(torch.full(SHAPE, value), label) for value, label in ((0.95, 1), (0.05, 0))]
    return {f"prototypes/{name}": torch.stack([one[name] for one in pair]) for name in pair[0]}


OUTCOMES: dict[Glfc, RoundOutcome] = {}
"""Of the latest round of each strategy."""


def play(made: Glfc, number: int, slope: float, method: dict[str, Tensor] | None = None) -> float:
    round_ = begun(made, {"slope": torch.zeros(())}, stamp=Stamp(**STAMP, round=number))
    OUTCOMES[made] = round_.ctx.outcome
    round_.add(Admitted("a", {"slope": torch.tensor(slope)}, abs(slope), 1, method=method or {}))
    return float(round_.result()["slope"])


def test_a_task_ends_with_the_model_that_is_best_on_the_made_images() -> None:
    made = strategy()
    assert play(made, 2, 3.0, bright_and_dark()) == pytest.approx(3.0)
    assert made.labels.tolist() == [1, 0]
    assert made.images[0].mean() > 0.7 and made.images[1].mean() < 0.3
    assert OUTCOMES[made].details == {"transitions": ["a"], "images": 2, "accuracy_on_images": 1.0}
    # no task begins in a run that goes on inside one
    copy = strategy(begun=False)
    copy.load_state_dict(made.state_dict())
    # one round of pre-training and two of the task: round 3 is the last, and its own model is the worse one
    for each in (made, copy):
        assert play(each, 3, -3.0) == pytest.approx(3.0)
        assert OUTCOMES[each].details["accuracy_on_images"] == 0.0
    made.begin_task(TaskStart(2, 4, range(2, 4), {}, ("a",)))
    assert len(made.labels) == 0 and not made.best


def test_without_images_the_latest_model_stays_and_it_is_fedavg() -> None:
    made = strategy()
    for number, slope in ((2, 3.0), (3, -3.0)):
        assert play(made, number, slope) == pytest.approx(slope)


def test_images_of_a_class_are_not_more_than_wanted() -> None:
    made = strategy(per_class=1)
    play(made, 2, 3.0, bright_and_dark())
    play(made, 3, 3.0, bright_and_dark())
    assert made.labels.tolist() == [1, 0]


@pytest.mark.parametrize("fault", ["missing", "shape", "number", "infinite"])
def test_gradients_that_are_none_are_rejected_before_any_sum(fault: str) -> None:
    made, faulty = strategy(), bright_and_dark()
    bias = "prototypes/head.bias"
    if fault == "missing":
        del faulty[bias]
    elif fault == "shape":
        faulty[bias] = torch.zeros(2, 3)
    elif fault == "number":
        faulty = {name: torch.cat([value, value]) for name, value in faulty.items()}
    else:
        faulty[bias] = torch.full((2, 2), torch.inf)
    round_ = begun(made, {"slope": torch.zeros(())}, stamp=Stamp(**STAMP, round=2))
    with pytest.raises(Rejected, match="prototypes: found"):
        round_.add(Admitted("b", {"slope": torch.tensor(5.0)}, 5.0, 1, method=faulty))
    round_.add(Admitted("a", {"slope": torch.tensor(1.0)}, 1.0, 1))
    assert float(round_.result()["slope"]) == pytest.approx(1.0)


def test_only_images_of_known_scale_will_do() -> None:
    rows = SimpleNamespace(
        experiment=SimpleNamespace(privacy=SimpleNamespace(mode="none")),
        input_shape=(4,),
        constants=None,
        sums=None,
    )
    with pytest.raises(ConfigError, match="glfc: makes images"):
        Glfc().attach(cast(RunContext, rows))
