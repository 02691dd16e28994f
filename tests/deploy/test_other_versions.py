"""An operator and two hospitals, one behind a proxy, one with a release that speaks another protocol."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

import perennial
from perennial.protocol.stamp import VERSION
from tests.deploy.connect_proxy import connect_proxy
from tests.deploy.test_deployment import EXPERIMENT
from tests.loopback import Deployment, digit_folders

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def other_release(folder: Path) -> Path:
    """A copy of the package that speaks the next version."""
    ignored = shutil.ignore_patterns("benchmarks", "__pycache__")
    shutil.copytree(Path(perennial.__file__).parent, folder / "perennial", ignore=ignored)
    stamp = folder / "perennial" / "protocol" / "stamp.py"
    text = stamp.read_text()
    changed = text.replace(f"\nVERSION = {VERSION}\n", f"\nVERSION = {VERSION + 1}\n")
    assert changed != text
    stamp.write_text(changed)
    return folder


@pytest.mark.slow
def test_both_sides_name_the_other_version_and_a_proxy_is_passed(tmp_path: Path) -> None:
    with Deployment(["graz", "linz"]) as deployment, connect_proxy() as proxy:
        deployment.init()
        digit_folders(deployment.folder / "data", deployment.names, 60)
        experiment = deployment.folder / "experiment.yaml"
        rounds = {"wait_for": 2, "deadline": 20}
        experiment.write_text(yaml.safe_dump({**EXPERIMENT, "rounds": rounds}))
        path = deployment.folder / "data"
        deployment.prepare(experiment, lambda name: {"data": {"path": str(path / name)}})
        deployment.environment["linz"] = {"PYTHONPATH": str(other_release(tmp_path))}
        deployment.environment["graz"] = {"https_proxy": proxy.url, "no_proxy": "127.0.0.1"}
        deployment.start_sites()
        assert set(proxy.asked) == {f"localhost:{deployment.fleet}"}, "graz came by its hospital's proxy"
        deployment.deploy("submit", experiment)
        assert deployment.wait_for_run("hospitals") == "finished:failed", deployment.logs()
        said = f"speaks protocol version {VERSION + 1}, this server {VERSION}: install the same release"
        assert said in deployment.deploy("logs", "hospitals")
        deployment.wait_for_log("linz", said)
        assert "speaks protocol version" not in deployment.log("graz")
        # a line of a log file has its time and what it is about, and no colours
        refused = rf"WARNING {TIME}: +site linz, run hospitals, round 0: refused: "
        assert re.search(refused, deployment.log("linz"))
        for name in ("superlink", "graz", "linz"):
            assert re.search(rf"INFO {TIME}: ", deployment.log(name)), deployment.log(name)
            assert "\x1b" not in deployment.log(name)
