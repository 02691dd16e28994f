"""A site lends digests once, at a price that is in its ledger, and can take them back."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.client.identity import Identity
from perennial.client.site import Site, open_site
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.foundation.errors import DataError, PolicyRefusal, PrivacyError, ProtocolError
from perennial.models.digest_networks import FeatureEncoder, hash_encoder
from perennial.privacy.ledger import Ledger
from perennial.protocol.messages import DigestRequest
from perennial.server.app import serve
from perennial.server.preflight import check_privacy
from perennial.strategies.digest_synthesis.site import answer_digest
from perennial.strategies.fedavg import FedAvg

EXPERIMENT: dict[str, Any] = {
    "name": "lending",
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 4},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "digests": {"per_digest": 4, "protection": "laplace", "epsilon": 8.0, "largest": 1.0},
    "evaluation": {"federated": False},
}


RUN = "0" * 16


def opened(folder: Path, policy: dict[str, Any] | None = None, **digests: Any) -> tuple[Site, DigestRequest]:
    changed = EXPERIMENT | {"digests": EXPERIMENT["digests"] | digests}
    experiment = Experiment.model_validate(changed)
    rules = SitePolicy.model_validate({"answers": ["train", "digest"]} | (policy or {}))
    site = open_site(Identity("site-1", experiment, rules, folder / "state", "cpu", 1, deployed=True))
    request = DigestRequest(
        run=RUN,
        experiment=experiment.digest,
        class_order=site.process.registry.order_hash,
        task=1,
        round=1,
        num_classes=10,
        encoder=hash_encoder(FeatureEncoder(site.data.input_shape, experiment.seed)),
    )
    return site, request


def test_asked_again_a_site_sends_the_same_digests_and_pays_once(tmp_path: Path) -> None:
    site, request = opened(tmp_path)
    first = answer_digest(site, request).digests
    again = answer_digest(site, replace(request, round=7)).digests
    assert first is not None
    assert again is not None
    assert all(torch.equal(first[name], again[name]) for name in ("features", "labels"))
    samples = len(site.data.find_task_indices("train", 0, 10))
    assert first["labels"].shape == (samples // 4, 10)
    (entry,) = Ledger(tmp_path / "state").read_entries()
    assert (entry.kind, entry.unit, entry.mechanism, entry.epsilon) == ("digest", "sample", "stated", 8.0)
    # another run has the same data: another release
    answer_digest(site, replace(request, run="1" * 16))
    assert Ledger(tmp_path / "state").cost(1e-5).epsilon == pytest.approx(16.0)


def test_every_protection_is_charged_at_what_it_is_worth(tmp_path: Path) -> None:
    site, request = opened(tmp_path / "gauss", protection="gauss", largest=None, norm=1.0)
    answer_digest(site, request)
    assert Ledger(tmp_path / "gauss" / "state").cost(1e-5).epsilon == pytest.approx(8.0, rel=0.02)
    site, request = opened(tmp_path / "both", label_epsilon=2.0)
    answer_digest(site, request)
    assert Ledger(tmp_path / "both" / "state").cost(1e-5).epsilon == pytest.approx(10.0)
    site, request = opened(tmp_path / "paper", protection="paper", epsilon=0.005, largest=None)
    answer_digest(site, request)
    (entry,) = Ledger(tmp_path / "paper" / "state").read_entries()
    assert entry.mechanism == "unprotected"
    assert entry.note == "nominal epsilon 0.005; with a public scale 1600"


@pytest.mark.parametrize(
    ("policy", "digests", "error", "reason"),
    [
        ({"max_epsilon": 400.0}, {}, PolicyRefusal, "lends no digests"),
        ({"min_samples": 1000}, {}, PolicyRefusal, "min_samples"),
        (
            {"require_privacy": "sample", "max_epsilon": 8.0},
            {"protection": "none", "epsilon": None},
            PolicyRefusal,
            "proves nothing",
        ),
        ({}, {"per_digest": 200}, DataError, "per_digest: 200"),
    ],
)
def test_what_the_site_does_not_allow_does_not_leave(
    tmp_path: Path, policy: dict[str, Any], digests: dict[str, Any], error: type[Exception], reason: str
) -> None:
    site, request = opened(tmp_path, policy, **digests)
    with pytest.raises(error, match=reason):
        answer_digest(site, request)
    # what follows from the data is charged, whatever comes of it
    told = [entry.kind for entry in Ledger(tmp_path / "state").read_entries()]
    assert told == (["digest"] if reason == "per_digest: 200" else [])
    assert site.state(RUN).get("digest-1", before=1) is None


def test_a_request_for_another_encoder_is_refused(tmp_path: Path) -> None:
    site, request = opened(tmp_path)
    with pytest.raises(ProtocolError, match="encoder: found abc"):
        answer_digest(site, replace(request, encoder="abc"))


def test_a_claim_that_digests_would_break_is_refused() -> None:
    local = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(PrivacyError, match="digest would leave without a proven guarantee"):
        experiment = Experiment.model_validate(EXPERIMENT | {"privacy": local})
        check_privacy(experiment, FedAvg(), estimated_constants=False)


class WithdrawingGrid(InProcessGrid):
    """site-1 withdraws its digests with its reply in round 2."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        request = self._queue[0] if self._queue else None
        for reply in super().pull_messages(message_ids):
            assert request is not None
            metadata, fields = request.metadata, reply.content.config_records["fields"]
            if metadata.message_type == "train" and metadata.dst_node_id == 2 and fields["round"] == 2:
                fields["lends_digests"] = False
            yield reply


def test_after_a_withdrawal_nothing_stands_in_and_the_guidance_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    gone = {"absence": [{"site": "site-1", "first_round": 3}]}
    path.write_text(yaml.safe_dump(EXPERIMENT | gone))
    run_config = dict(vars(RunSettings(str(path), runs=str(tmp_path / "runs"))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    summary = serve(WithdrawingGrid(client_app, build_site_contexts(3, run_config)), context, "in-process")
    lines = (tmp_path / "runs" / "lending" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    held = [event["details"]["digests"]["sites"] for event in events if event["event"] == "round"]
    assert held == [["site-0", "site-1", "site-2"]] + [["site-0", "site-2"]] * 3
    stood_in = [event["details"]["digests"]["stood_in"] for event in events if event["event"] == "round"]
    assert stood_in == [{}] * 4
    assert any("site-1 has withdrawn its digests" in event.get("text", "") for event in events)
    assert summary["digest"]["withdrawn"] == ["site-1"]
