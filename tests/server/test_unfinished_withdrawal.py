"""A site is withdrawn from a run that has not finished, and the run goes on as if it had never taken part."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from perennial.server.curriculum import Curriculum
from perennial.server.withdrawal import withdraw
from tests.strategies.test_analytic_runs import own_cache, run, sums_of

__all__ = ["own_cache"]
DATA = {"partition": {"kind": "iid"}, "validation_fraction": 0.0}
TASKS = {"count": 3, "rounds": 1}


@pytest.mark.parametrize("stops_in", ["_finish_task", "_begin_task"])
def test_a_run_that_was_stopped_goes_on_without_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_in: str
) -> None:
    """Between two tasks, and after a round of a task that is not over."""
    honest = getattr(Curriculum, stops_in)

    def stop(self: Curriculum, task: int) -> None:
        if task == 2:
            raise KeyboardInterrupt
        honest(self, task)

    monkeypatch.setattr(Curriculum, stops_in, stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "stopped", data=DATA, tasks=TASKS)
    monkeypatch.setattr(Curriculum, stops_in, honest)
    folder = tmp_path / "runs" / "stopped"
    for _ in ("once", "said twice, it is done once"):
        certificate = withdraw(folder, "site-2")
        assert certificate is not None and certificate.exists()
    assert not list((folder / "statistics").glob("site-2-*"))
    away = [{"site": "site-2", "first_round": 1}]
    never = run(tmp_path, "never", data=DATA, tasks=TASKS, absence=away)
    resumed = run(tmp_path, "stopped", data=DATA, tasks=TASKS, resume="yes")
    assert sums_of(resumed) == sums_of(never)
    assert resumed["model_sha256"] == never["model_sha256"]
    a, b = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("stopped", "never"))
    assert all(a[key].equal(b[key]) for key in b)
