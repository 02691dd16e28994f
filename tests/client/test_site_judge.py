"""A model measured by the sites, for a server without samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from flwr.app import Context, Message

from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.learning.scored import Worth
from perennial.protocol.messages import EvaluateReply, EvaluateRequest, Refusal
from perennial.protocol.stamp import Stamp
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.site_utility import SiteJudge

MODEL = {"w": torch.ones(3)}
Counts = tuple[list[int], list[int]]


def asked(counts: Mapping[str, Counts | None]) -> tuple[Worth | None, SiteJudge]:
    """The judgement of sites that report these counts; None refuses."""
    names = list(counts)

    def client(message: Message, context: Context) -> Message:
        request = EvaluateRequest.from_record(message.content)
        found = counts[names[int(context.node_config["partition-id"])]]
        if found is None:
            refusal = Refusal(site="a", kind="policy", reason="does not evaluate")
            return Message(refusal.to_record(), reply_to=message)
        reply = EvaluateReply(**request.stamp_fields, correct=found[0], total=found[1])
        return Message(reply.to_record(), reply_to=message)

    grid = InProcessGrid(client, build_site_contexts(len(names), {}))
    stamp = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=1, num_classes=2)
    nodes = dict(zip(names, grid.get_node_ids(), strict=True))
    judge = SiteJudge()
    return judge(grid, RoundRequest(stamp=stamp, arrays=MODEL, sites=nodes, deadline=1.0), MODEL), judge


def test_the_median_of_the_sites_is_not_moved_by_one_that_lies() -> None:
    honest = {"a": ([3, 3], [5, 5]), "b": ([4, 3], [5, 5])}
    for lie in (([0, 0], [5, 5]), ([5, 5], [5, 5])):
        value, judge = asked({**honest, "liar": lie})
        assert value in ([0.6, 0.6], [0.8, 0.6])
        assert judge.sent == 3 * 12


def test_who_does_not_measure_is_named_and_left_out() -> None:
    value, judge = asked(
        {"a": ([1, 0], [2, 0]), "silent": None, "wrong": ([9, 0], [2, 0]), "none": ([0, 0], [0, 0])}
    )
    assert value == [0.5, None]
    assert set(judge.failed) == {"silent", "wrong"}
    assert "more right answers than samples" in judge.failed["wrong"]


def test_a_ring_is_valued_by_its_sites(tmp_path: Path) -> None:
    path = tmp_path / "ring.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "ring",
                "data": {"source": "digits", "sites": 3, "samples_limit": 300, "partition": {"kind": "iid"}},
                "tasks": {"count": 1, "rounds": 3},
                "model": {"name": "mlp", "hidden": [16]},
                "learner": {"preset": "none", "optimizer": {"name": "adam", "lr": 0.01}},
                "evaluation": {"central": False, "federated": True},
                "adversaries": [{"site": "site-1", "kind": "free_rider"}],
                "strategy": {"name": "contribution", "base": {"name": "serial_ring", "segments": 2}},
            }
        )
    )
    summary: dict[str, Any] = run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs")))
    values = {site: entry["value"] for site, entry in summary["contribution"].items()}
    assert values["site-1"] == 0.0
    assert min(values["site-0"], values["site-2"]) > 0
    assert summary["contribution"]["site-1"]["flag"] == "null update"
    # six sweeps of three turns, one of them null, and each round's end: 15 models to 3 sites beside 18 turns
    model = summary["ring"]["bytes_equation_23"] // 9
    assert summary["bytes_down"] >= (18 + 3 * 15) * model
