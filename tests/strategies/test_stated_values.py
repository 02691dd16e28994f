"""Values that other rules rest on, and that no run of a moment would miss."""

import json
from typing import Any

import pytest
import torch

from perennial.data.site import NOTHING
from perennial.privacy.shared_noise_cost import MOST_VALUES
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic.heads import HeadSettings
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel
from perennial.strategies.round.request import with_settings
from perennial.strategies.serial_ring.method import SerialRing

STAMP: dict[str, Any] = {
    "run": "r",
    "experiment": "e",
    "class_order": "c",
    "task": 1,
    "round": 1,
    "num_classes": 2,
}


def test_a_site_without_calibration_samples_has_none_and_not_the_first() -> None:
    assert NOTHING.shape == (0,)


def test_the_cost_of_shared_noise_is_counted_for_larger_models_than_any_here() -> None:
    assert MOST_VALUES >= 100_000_000


def test_a_round_begins_with_nothing_sent_and_takes_no_time() -> None:
    outcome = RoundOutcome()
    assert (outcome.bytes_up, outcome.bytes_down, outcome.seconds) == (0, 0, 0.0)


def test_the_previous_model_travels_whole_to_a_site_that_lacks_it() -> None:
    read = []
    previous = PreviousModel("0" * 64, lambda: read.append(1) or {"weight": torch.ones(2)})
    assert previous.fields(held=True)["previous_arrays"] is None
    assert read == []
    sent = previous.fields(held=False)["previous_arrays"]
    assert sent is not None
    assert set(sent) == {"weight"}


def test_settings_of_two_strategies_have_one_text_whatever_their_order() -> None:
    bare = TrainRequest(**STAMP, arrays=Tensors())
    made = json.dumps({"a": 1, "b": 2}, sort_keys=True)
    assert with_settings(with_settings(bare, b=2), a=1).settings == made


def test_a_ring_goes_on_without_a_site_that_is_busy() -> None:
    assert not SerialRing.traits.waits_for_busy_sites


def test_only_the_gaussian_head_bounds_its_shrinkage_by_one() -> None:
    assert HeadSettings.of("balanced_ridge", 4.0, None, "balanced", 0.0, True).shrinkage == 4.0
    with pytest.raises(ValueError, match="allowed up to 1 with head gaussian"):
        HeadSettings.of("gaussian", 4.0, None, "balanced", 0.0, True)
