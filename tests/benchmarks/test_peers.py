"""Simulators side by side: the prepared task is the engine's own, steps are compared, memory is of a whole
tree, and the page says what the committed lines say."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import page
from benchmarks.peers.__main__ import check_steps
from benchmarks.peers.contestants import CONTESTANTS, Adapter
from benchmarks.peers.environments import python_of
from benchmarks.peers.prepare import write_task
from benchmarks.peers.task import CountedSGD, accuracy, batches, network, read_task
from benchmarks.peers.watch import watched
from benchmarks.workloads import write_workload
from perennial.config.experiment import load_experiment
from perennial.data.federation import build
from perennial.models.factory import build_model

ENTRY: dict[str, Any] = {
    "workload": "w1",
    "simulator": True,
    "peak_mib": 300.0,
    "accuracy": 0.9,
    "steps": 40,
    "samples": {"whole_seconds": [1.0, 2.0]},
    "versions": {"torch": "1"},
    "machine": "a machine",
    "load_before": 0.1,
}


def entry(peer: str, whole: float, rounds: float, **more: Any) -> dict[str, Any]:
    return {**ENTRY, "peer": peer, "whole_seconds": whole, "rounds_seconds": rounds, **more}


def test_the_prepared_task_is_the_engines_own(tmp_path: Path) -> None:
    experiment = load_experiment(write_workload("w2", tmp_path))
    write_task(experiment, tmp_path)
    task = read_task(tmp_path)
    federation = build(experiment.data, experiment.tasks, experiment.seed)
    theirs = [site.y[site.train] for site in federation.sites.values()]
    assert all(torch.equal(y, other) for (_, y), other in zip(task.sites, theirs, strict=True))
    assert (task.rounds, task.sites_per_round, task.epochs, task.batch_size) == (40, 10, 1, 8)
    model = build_model(experiment.model, federation.input_shape, 10, experiment.seed).eval()
    x = task.test[0][:20]
    assert torch.allclose(network(task)(x), model(x), atol=1e-6)
    right = (model(task.test[0]).argmax(dim=1) == task.test[1]).float().mean()
    assert accuracy(network(task), task.test) == pytest.approx(float(right), abs=1e-3)


def test_an_epoch_has_every_sample_once_and_its_steps_are_counted() -> None:
    samples = torch.arange(10.0), torch.arange(10)
    parts = list(batches(samples, 4, torch.Generator().manual_seed(1)))
    assert [len(y) for _, y in parts] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in parts]).tolist()) == list(range(10))
    before = CountedSGD.steps
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    CountedSGD([parameter], lr=0.5).step()
    assert CountedSGD.steps == before + 1
    assert float(parameter) == 0.5


def test_different_numbers_of_steps_are_an_error() -> None:
    check_steps("w1", {"a": [40, 40], "b": [40]})
    with pytest.raises(RuntimeError, match=r"w1: different numbers of local steps: .*39"):
        check_steps("w1", {"a": [40], "b": [39]})
    with pytest.raises(RuntimeError, match="different"):
        check_steps("w1", {"a": [0], "b": [0]})


def test_memory_is_that_of_all_processes_together() -> None:
    child = "x = bytearray(120_000_000); import time; time.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('{{}}')"
    alone, with_child = watched("-c", child), watched("-c", parent)
    assert 120_000 < alone.peak_kib * 1024 / 1000 < 180_000
    assert with_child.peak_kib > alone.peak_kib
    with pytest.raises(RuntimeError, match="exit code 3"):
        watched("-c", "raise SystemExit(3)")


def test_an_environment_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pip"):
        python_of("broken", ["no package/of this kind"], tmp_path)
    assert not (tmp_path / "broken" / "installed").exists()


def test_the_verdict_names_the_fastest_rival_and_leaves_the_plain_loop_out() -> None:
    entries = [
        entry("plain PyTorch loop", 1.0, 1.0, simulator=False),
        entry("Perennial, one worker", 6.0, 4.0),
        entry("Perennial, two workers", 4.0, 2.0),
        entry("slow", 50.0, 20.0),
        entry("fast", 5.0, 3.0),
    ]
    whole = page.verdict(entries, "whole_seconds", "start to exit")
    assert "fast" in whole
    assert "one worker: NOT faster (1.20 times)" in whole
    assert "two workers: faster (0.80 times)" in whole
    text = page.as_markdown(entries)
    assert "| fast | 5.0 | 3.0 | 300 | 90.0 | 2 |" in text
    assert "W1, 40 local steps" in text


def test_every_adapter_is_a_module_with_pinned_packages() -> None:
    folder = Path(page.__file__).parent
    for contestant in CONTESTANTS.values():
        if isinstance(contestant, Adapter):
            assert (folder / f"{contestant.module}.py").exists()
            assert contestant.python == Path(sys.executable)
            assert all("==" in requirement for requirement in contestant.requirements)


def test_the_committed_lines_are_whole_and_the_page_is_theirs() -> None:
    entries = page.read()
    for workload in ("w1", "w2", "w3"):
        check_steps(workload, {e["peer"]: [e["steps"]] for e in entries if e["workload"] == workload})
    assert page.MARKDOWN.read_text() == page.as_markdown(entries)
