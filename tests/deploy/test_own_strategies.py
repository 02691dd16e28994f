"""The pages on extending at real sites, which have the code of the loss and of a site half."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.server.summary import extract_hashes
from tests.extend_pages import MODULES
from tests.loopback import ROOT, Deployment

SITES = ["site-0", "site-1"]
EXPERIMENT: dict[str, Any] = {
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "validation_fraction": 0.2},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 2, "quorum": 2, "deadline": 300},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}
OWN: dict[str, dict[str, Any]] = {
    "measured": {"strategy": {"name": "my_accuracy:ByAccuracy"}},
    "kept": {"strategy": {"name": "my_momentum:Momentum"}},
    "wrapped": {"strategy": {"name": "my_clipping:Clipped", "length": 5.0, "base": "fedavg"}},
    "half": {"strategy": {"name": "my_prox:Prox", "mu": 0.3}},
    "loss": {"learner": {**EXPERIMENT["learner"], "classification": {"name": "my_loss:Focal"}}},
}
INSTALLED = {
    "my_loss": "[perennial.losses]\nfocal = my_loss:Focal\n",
    "my_prox": "[perennial.strategies]\nprox = my_prox:Prox\n",
}
"""Packages of the hospitals, each with what it offers."""
TRUSTING = {
    "answers": ["train", "evaluate"],
    "min_samples": 1,
    "require_privacy": "none",
    "max_epsilon": None,
}


class Own(Deployment):
    """A federation whose operator has a folder of every module of the page, and names it in deploy.yaml.

    Its hospitals have installed the loss and the method that has a site half.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        super().__init__(SITES)
        folders = {"operator": modules, "hospital": {name: modules[name] for name in INSTALLED}}
        for name, held in folders.items():
            (self.folder / f"{name}-modules").mkdir()
            for module, code in held.items():
                (self.folder / f"{name}-modules" / f"{module}.py").write_text(code)
        for module, offered in INSTALLED.items():
            facts = self.folder / "hospital-modules" / f"{module}-1.0.dist-info"
            facts.mkdir()
            (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
            (facts / "entry_points.txt").write_text(offered)
        self.installed = os.pathsep.join([str(ROOT), str(self.folder / "hospital-modules")])
        self.environment |= {site: {"PYTHONPATH": self.installed} for site in SITES}


@pytest.fixture(scope="module")
def federation() -> Iterator[Own]:
    with Own(MODULES) as deployment:
        deployment.init()
        federation = deployment.operator / "deploy.yaml"
        content = yaml.safe_load(federation.read_text())
        content["plugins"] = [str(deployment.folder / "operator-modules")]
        federation.write_text(yaml.safe_dump(content))
        deployment.start_superlink()
        for site in SITES:
            deployment.make_site(site)
            deployment.edit_site(site, data=None, policy=TRUSTING)
        deployment.start_sites()
        yield deployment


def approve(deployment: Own, said: str, fails: bool = False) -> str:
    """What every hospital does with what `deploy stage` printed, and what the last one reads."""
    fab, digest = said.split()[-2:]
    commands = (("site", "approve", fab, digest, "--site", deployment.site_file(site)) for site in SITES)
    with pytest.MonkeyPatch.context() as patch:
        # what is installed at the hospitals, and not at the operator
        patch.setenv("PYTHONPATH", deployment.installed)
        return [deployment.perennial(*command, fails=fails) for command in commands][-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OWN)
def test_what_is_ones_own_gives_the_bits_of_one_process_at_real_sites(federation: Own, name: str) -> None:
    experiment = federation.folder / f"{name}.yaml"
    experiment.write_text(yaml.safe_dump({**EXPERIMENT, "name": name, **OWN[name]}))
    staged = federation.deploy("stage", experiment)
    if name in ("loss", "half"):
        package = "my_loss" if name == "loss" else "my_prox"
        said = approve(federation, staged, fails=True)
        assert f"write `plugins: {{{package}: SHA256}}` in site.yaml" in said
        for site in SITES:
            federation.edit_site(site, plugins={package: "SHA256"})
        found = re.findall(r"has SHA-256 (\w{64})", approve(federation, staged, fails=True))
        for site in SITES:
            federation.edit_site(site, plugins={package: found[0]})
    said = approve(federation, staged)
    assert bool(re.search("beside each update: .*held_out_accuracy", said)) == (name == "measured")
    federation.deploy("submit", experiment)
    assert federation.wait_for_run(name, seconds=300) == "finished:completed", federation.logs()
    folder = federation.operator / "state" / "runs" / name
    there = json.loads((folder / "summary.json").read_text())
    named, runs = str(federation.folder / "operator-modules"), str(federation.folder / "here")
    here = run_in_process(RunSettings(str(experiment), runs=runs, plugins=named))
    assert there["engine"] == "grpc" and extract_hashes(there) == extract_hashes(here)
    assert there["rounds"] == 2
