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
from benchmarks.table import ROOT
from perennial.config.run import APP_ROOT, RunSettings
from perennial.foundation.plugins import using
from perennial.protocol.messages import TrainRequest


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
