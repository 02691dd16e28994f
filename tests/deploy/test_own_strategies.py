"""The strategies of docs/extend.md at real sites, which have none of their code."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.benchmarks.loopback import ROOT, Deployment

PAGE = (ROOT / "docs" / "extend.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NAMED = re.findall(r'"(my_\w+):\w+"', "".join(BLOCKS))
SITES = ["graz", "linz"]
EXPERIMENT: dict[str, Any] = {
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "validation_fraction": 0.2},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 2, "quorum": 2, "join_timeout": 300, "deadline": 300},
    "learner": {"optimizer": {"lr": 0.05}},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    # one that asks for measurements inside a wrapper, one with state, and one with settings at the sites
    "measured": {
        "name": "my_clipping:Clipped",
        "length": 5.0,
        "base": {"name": "my_accuracy:ByAccuracy"},
    },
    "kept": {"name": "my_momentum:Momentum"},
    "set": {"name": "my_settings:Regularised", "alpha": 0.05},
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_strategies_of_ones_own_pass_real_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in zip(NAMED, CODE, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    with Deployment(SITES) as deployment:
        # the operator has the modules, the sites have not
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        monkeypatch.setenv("PYTHONPATH", path)
        deployment.environment["superlink"] = {"PYTHONPATH": path}
        deployment.init()
        experiments = {}
        for name, strategy in STRATEGIES.items():
            experiments[name] = deployment.folder / f"{name}.yaml"
            experiments[name].write_text(yaml.safe_dump({**EXPERIMENT, "name": name, "strategy": strategy}))
        deployment.prepare(experiments["measured"], lambda site: {"data": None, "policy": TRUSTING})
        for name in ("kept", "set"):
            fab, digest = deployment.deploy("stage", experiments[name]).split()[-2:]
            for site in SITES:
                deployment.perennial("site", "approve", fab, digest, "--site", deployment.site_file(site))
        deployment.start_sites()
        for name, experiment in experiments.items():
            deployment.deploy("submit", experiment)
            assert deployment.wait_for_run(name, seconds=400) == "finished:completed", deployment.logs()
            folder = deployment.operator / "state" / "runs" / name
            assert (folder / "summary.json").exists()
        events = (deployment.operator / "state" / "runs" / "measured" / "events.jsonl").read_text()
        assert "held_out_accuracy" not in events, "a reply without the measurement is dropped by its name"
        for site in SITES:
            state = deployment.folder / site / "state"
            assert [*state.rglob("*correction*")], "the site's own half of the correction has run"


TRUSTING = {
    "answers": ["train", "evaluate"],
    "min_samples": 1,
    "require_privacy": "none",
    "max_epsilon": None,
}
