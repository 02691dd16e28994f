"""A workload written as arrays, for simulators that do not know Perennial."""

import json
from pathlib import Path

import numpy as np

from perennial.config.experiment import Experiment
from perennial.data.federation import build
from perennial.learning.batches import to_float
from perennial.models.factory import build_model


def write_task(experiment: Experiment, folder: Path) -> None:
    """task.npz and task.json in folder: the engine's own division, test set and first model.

    Samples are written as normalised floats and nothing of this is timed, which is in the peers' favour.
    """
    federation = build(experiment.data, experiment.tasks, experiment.seed)
    test, learner = federation.test, experiment.learner
    if test is None:
        raise ValueError(f"{experiment.name}: needs a test set at the server")
    model = build_model(experiment.model, federation.input_shape, len(federation.classes), experiment.seed)
    initial = [parameter.detach().numpy() for parameter in model.parameters()]
    data = list(federation.sites.values())
    x = [to_float(site.x[site.train], site.mean, site.std).numpy() for site in data]
    np.savez(
        folder / "task.npz",
        x=np.concatenate(x),
        y=np.concatenate([site.y[site.train].numpy() for site in data]),
        x_test=to_float(test.x[test.test], test.mean, test.std).numpy(),
        y_test=test.y[test.test].numpy(),
        model=np.concatenate([values.ravel() for values in initial]),
    )
    facts = {
        "rounds": federation.schedule.rounds[0],
        "sites_per_round": round(experiment.rounds.fraction * len(data)),
        "epochs": learner.epochs,
        "batch_size": learner.batch_size,
        "lr": learner.optimizer.lr,
        "momentum": learner.optimizer.momentum,
        "seed": experiment.seed,
        "sizes": [len(site) for site in x],
        "shapes": [values.shape for values in initial],
    }
    (folder / "task.json").write_text(json.dumps(facts))
