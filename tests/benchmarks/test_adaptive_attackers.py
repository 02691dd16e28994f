"""Attackers that know the server: their copy of it foresees the model; the rules that they are tried on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import Tensor

from benchmarks import dishonest
from benchmarks.adaptive import AdaptiveClient
from benchmarks.compared_rules import (
    Bucketing,
    CentredClipping,
    Compared,
    GeometricMedian,
    Krum,
    TrimmedMean,
)
from benchmarks.table import ROOT
from perennial.config.run import APP_ROOT, RunSettings
from perennial.foundation.plugins import using
from perennial.protocol.messages import TrainRequest

HAND = torch.tensor([(1.0, 2.0), (1.2, 1.8), (0.8, 2.2), (1.1, 2.1), (10.0, -10.0)], dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["fedavg", "median", "benchmarks.compared_rules:CentredClipping"])
def test_the_attackers_foresee_the_model_of_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    foreseen: list[dict[str, Tensor]] = []
    seen: dict[int, Any] = {}

    class Watched(AdaptiveClient):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train":
                request = TrainRequest.from_record(message.content)
                if request.round not in seen and foreseen:
                    seen[request.round] = (request.arrays, foreseen[-1])
            return super().__call__(message, context)

        def _server(self, *arguments: Any) -> dict[str, Tensor]:
            foreseen.append(super()._server(*arguments))
            return foreseen[-1]

    monkeypatch.setattr(dishonest, "AdaptiveClient", Watched)
    changes = ["tasks={count: 1, rounds: 3}", "data.partition.alpha=100", f"strategy.name={strategy}"]
    path = str(APP_ROOT / "experiments" / "robust_digits.yaml")
    settings = RunSettings(path, json.dumps(changes), runs=str(tmp_path), device="cpu")
    with using([ROOT]):
        dishonest.attacked_run(settings, "adaptive")
    assert sorted(seen) == [2, 3]
    for arrays, expected in seen.values():
        assert all(torch.allclose(arrays[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (TrimmedMean, (1.1, 1.966667)),
        (Krum, (1.05, 2.05)),
        (GeometricMedian, (1.037085, 1.997391)),
        (CentredClipping, (1.148301, 1.283677)),
    ],
)
def test_the_hand_case_of_each_compared_rule(rule: type[Compared], expected: tuple[float, float]) -> None:
    assert rule().step(HAND).tolist() == pytest.approx(expected, abs=1e-4)


def test_pairs_are_dealt_anew_in_each_round() -> None:
    rule = Bucketing()
    steps = {tuple(rule.step(HAND).tolist()) for _ in range(8)}
    assert len(steps) > 1 and all(0.9 < first <= 1.2 for first, _ in steps)
