"""Rows of a table on two Ray nodes of one machine: the same result file as without them, and it goes on."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid import jobs, read_results, run_table
from benchmarks.ray_cluster import connect, on_cluster
from benchmarks.table import Row, Table
from perennial.foundation.errors import ConfigError

pytestmark = pytest.mark.slow
STORE = 80 * 2**20
"""Bytes of a node's object store, the least that Ray takes."""
CHANGES = ("data.samples_limit=600", "tasks.rounds=1", "learner.epochs=1")
ROWS = [Row("as it is", "quickstart", CHANGES), Row("longer", "quickstart", (*CHANGES, "learner.epochs=2"))]
TABLE = Table("A small table", ROWS, seeds=(1, 2))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of one core each."""
    import ray
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *([before] if before else [])])
    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE}
    nodes = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    nodes.add_node(**options)
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def test_work_is_dealt_to_both_nodes(cluster: None) -> None:
    # inside, so that it travels whole: no machine of a cluster has the tests
    def where(number: int, device: str) -> str:
        """The node that did it, slowly enough for the other one to take its share."""
        import ray

        time.sleep(2.0)
        return ray.get_runtime_context().get_node_id()

    found = dict(on_cluster([1, 2, 3, 4], where, "cpu"))
    assert sorted(found) == [1, 2, 3, 4]
    assert len(set(found.values())) == 2


def test_a_table_is_the_same_on_a_cluster_and_goes_on_there(cluster: None, tmp_path: Path) -> None:
    here = run_table("t", TABLE, lambda text: None, device="cpu", results=tmp_path / "here")
    path = tmp_path / "there" / "t.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(here[0]) + "\n")
    told: list[str] = []
    there = run_table("t", TABLE, told.append, device="cpu", results=path.parent, on="ray")
    # three were missing; controls of the rows are told beside them
    assert len([line for line in told if line.startswith("t: ")]) == 3
    assert [run["model_sha256"] for run in there] == [run["model_sha256"] for run in here]
    assert [run["measures"] for run in read_results(path)] == [run["measures"] for run in here]
    assert path.with_suffix(".md").exists()


def test_a_machine_with_other_files_refuses(cluster: None, tmp_path: Path) -> None:
    from benchmarks.grid import _run_there

    wrong = replace(jobs(TABLE)[0], settings="0" * 64)
    with pytest.raises(
        ConfigError, match="as it is, seed 1: the experiment on .* all machines need the same"
    ):
        list(on_cluster([wrong], _run_there, "cpu"))


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def nobody(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(ConfigError, match=r"no cluster answers; start one with `ray start --head`"):
        connect()
