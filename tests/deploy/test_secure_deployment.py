"""Three real sites on loopback whose server sees masked sums alone, TLS, node keys and pinned peers on."""

import functools
import json
from typing import Any

import pytest
import yaml

from perennial.client.secure_state import LAST
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from tests.loopback import Deployment

SITES = ["site-0", "site-1", "site-2"]
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "rounds": {"wait_for": 3, "quorum": 3, "deadline": 300},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "secure": {"least": 3, "assumed_colluders": 1},
}


STATISTICS: dict[str, Any] = {
    **{key: EXPERIMENT[key] for key in ("name", "data", "rounds", "secure")},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "features", "features": [{"name": "random", "width": 60}]},
    "strategy": {"name": "analytic", "head": "ridge"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("content", "opened"),
    [
        (EXPERIMENT, ["update", "update", "temperature", "evaluation"]),
        (STATISTICS, [*["statistics"] * 5, "temperature", "evaluation"] * 2),
    ],
    ids=["updates", "statistics"],
)
def test_deployed_masked_sums_come_to_the_bits_of_clear_ones_in_process(
    content: dict[str, Any], opened: list[str]
) -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        clear = content["secure"] | {"masks": False}
        path = deployment.folder / "clear.yaml"
        path.write_text(yaml.safe_dump(content | {"secure": clear}))
        here = run_in_process(RunSettings(str(path), runs=str(deployment.folder / "here")))
        experiment = deployment.folder / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(content))

        @functools.cache
        def peers() -> dict[str, str]:
            bundles = {name: deployment.operator / "bundles" / f"{name}.tar.gz" for name in SITES}
            said = {
                name: deployment.perennial("site", "open", path, "--folder", deployment.folder / name)
                for name, path in bundles.items()
            }
            return {name: words.split("signing key: ")[1].split()[0] for name, words in said.items()}

        def edit(site: str) -> dict[str, Any]:
            policy = {"require_secure": True, "least_sites": 3, "assumed_colluders": 1, "peers": peers()}
            policy["answers"] = ["train", "evaluate", "statistics"]
            return {"data": None, "policy": policy}

        deployment.prepare(experiment, edit)
        deployment.start_sites()
        deployment.submit()
        assert deployment.wait_for_run("hospitals", seconds=600) == "finished:completed", deployment.logs()
        there = json.loads((deployment.run_folder / "summary.json").read_text())
        assert there["engine"] == "grpc"
        assert there["model_sha256"] == here["model_sha256"]
        assert there["federated_accuracy"] == here["federated_accuracy"]
        for name in SITES:
            kept = deployment.folder / name / "state" / "secure" / "opened.json"
            statistics = [statistic for statistic, *_ in json.loads(kept.read_text())]
            assert [found for found in statistics if found != LAST] == opened
