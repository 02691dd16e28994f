"""What a run does to save memory with a large model changes no bit."""

from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from perennial import run
from perennial.client import site_models, training_turn
from perennial.learning.training import TrainingResult
from perennial.models import flat
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.server.position import GlobalModel

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("tasks.count=2", "tasks.rounds=2", "learner.epochs=1", "evaluation.every=round")


@pytest.mark.parametrize("experiment", ["replay_digits", "pp_fcil_digits"])
def test_memory_is_given_back_and_the_bits_stay(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "experiments" / f"{experiment}.yaml"
    plain = run(path, name="plain", runs=tmp_path, overrides=SMALL)
    given_back = []
    forget = flat.FlatParameters.forget

    def counted(self: flat.FlatParameters) -> None:
        given_back.append(self)
        forget(self)

    monkeypatch.setattr(flat, "LARGE", 1)
    monkeypatch.setattr(flat.FlatParameters, "forget", counted)
    saving = run(path, name="saving", runs=tmp_path, overrides=SMALL)
    assert given_back
    assert saving.summary["model_sha256"] == plain.summary["model_sha256"]
    assert saving.summary["accuracy_matrix"] == plain.summary["accuracy_matrix"]


def test_nothing_large_outlives_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is gone before the next site trains; teachers and finished models are no copies."""
    updates: list[StorageWeakRef] = []
    alive: list[int] = []
    train, teacher, frozen = training_turn.train, site_models.SiteModels.teacher, GlobalModel.frozen

    def watched(*arguments: Any, **keywords: Any) -> TrainingResult:
        alive.append(sum(not update.expired() for update in updates))
        result = train(*arguments, **keywords)
        updates.append(StorageWeakRef(result.update.untyped_storage()))
        return result

    def shared(self: site_models.SiteModels, previous: Any) -> IncrementalModel:
        model = teacher(self, previous)
        taught = complete_state(model)
        assert all(taught[name].data_ptr() == tensor.data_ptr() for name, tensor in previous[1].items())
        shares.append("teacher")
        return model

    def as_it_is(self: GlobalModel) -> Any:
        found = frozen(self)
        assert all(found[name] is tensor for name, tensor in self.arrays.items())
        shares.append("finished model")
        return found

    shares: list[str] = []
    monkeypatch.setattr(training_turn, "train", watched)
    monkeypatch.setattr(site_models.SiteModels, "teacher", shared)
    monkeypatch.setattr(GlobalModel, "frozen", as_it_is)
    overrides = (*SMALL, "learner.distillation.weight=1.0")
    done = run(ROOT / "experiments" / "replay_digits.yaml", name="r", runs=tmp_path, overrides=overrides)
    # the updates of a run's first round wait for each other, in a file if the model is large
    sites = done.experiment.data.sites
    assert sites and len(alive) == 4 * sites
    assert not any(alive[sites:])
    assert {*shares} == {"teacher", "finished model"}
