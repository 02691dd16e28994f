"""Incre-FL end to end: its summary block, and what the journal says of a site that decides alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import answer, run_in_process
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve

SMALL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "small_cnn", "channels": [8, 8], "squeeze_excitation": True},
    "learner": {
        "preset": "none",
        "batch_size": 32,
        "optimizer": {"lr": 0.5},
        "classification": "icarl_bce",
        "memory": {"fixed_total": 60},
        "classifier": "nearest_mean",
    },
    "strategy": {"name": "layer_attention", "scale": "mean", "head_query": "client_mean"},
    "pretraining": {"samples": 8, "rounds": 1},
}


def test_the_block_has_each_sites_weight_in_each_layer(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    whole: dict[str, Any] = run_in_process(RunSettings(str(path), runs=str(tmp_path)))
    assert "backbone.attention.squeeze.weight" in whole["attention"]
    for row in whole["attention"].values():
        assert sorted(row) == ["site-0", "site-1", "site-2"]
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-12)
    assert "Weight of each site in each layer" in (tmp_path / "small" / "report.html").read_text()


def test_a_site_that_decides_alone_is_named_in_the_journal_and_over_the_heat_map(tmp_path: Path) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply = answer(message, context)
        if message.metadata.message_type != "train" or context.node_config["partition-id"] != 0:
            return reply
        content = TrainReply.from_record(reply.content)
        update = Tensors({name: -100 * tensor for name, tensor in content.update.items()})
        return Message(replace(content, update=update).to_record(), reply_to=message)

    path = tmp_path / "experiment.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                **SMALL,
                "strategy": "layer_attention",
                "tasks": {"count": 1, "rounds": 1},
            }
        )
    )
    config = dict(vars(RunSettings(str(path), runs=str(tmp_path))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    summary = serve(InProcessGrid(lying, build_site_contexts(3, config)), context, "in-process")
    assert max(row["site-0"] for row in summary["attention"].values()) > 0.9
    warning = "round 2: attention: site site-0 has more than 90% of the weight"
    folder = tmp_path / "small"
    assert warning in (folder / "events.jsonl").read_text()
    section = (folder / "report.html").read_text().split('id="attention"')[1].split("</section>")[0]
    assert f"The journal warns 1 time; last in {warning}" in section
    assert "Weight of each site in each layer" in section
