"""Which of its training records a site has learnt in a run, by keyed hash: for data that grow later.

A record is known by the hash that also divides it (data/splits.py), under the run's key and a label of its
own, so that the file says nothing of the record to whoever lacks either. Each task has one file, written when
the site first trains in it; records that come while a task lasts are trained on and not in it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.site import Site
from perennial.client.state import read_safetensors
from perennial.foundation.files import make_folder, replace_file
from perennial.protocol.stamp import Stamp

FOLDER = "learnt"
VALUES = "values"


def note_learnt(site: Site, stamp: Stamp, rows: Tensor, task: int | None = None) -> None:
    """Write down the records that a site trains on, or adds up, in a task.

    rows: their indices in its data. task: None is the stamp's; a late site adds up those of earlier ones.
    """
    if not site.experiment.data.kind.collected:
        return
    path = _folder(site.state(stamp.run).folder) / f"task-{task or stamp.task:05d}.safetensors"
    if path.exists():
        return
    from safetensors.torch import save

    values = _hashes(site, rows)
    make_folder(path.parent)
    # lost with the machine, these records would be trained on once more when the run goes on
    replace_file(path, save({VALUES: torch.from_numpy(values.view(np.int64).copy())}), durable=False)


def not_learnt(site: Site, stamp: Stamp) -> Tensor:
    """Indices of training records of earlier classes that came after their task, in a run that goes on.

    Empty in the tasks that the run began with, and for a learner that trains on nothing of earlier classes.
    """
    experiment = site.experiment
    begun_with = experiment.tasks.learnt
    if not begun_with or stamp.task <= begun_with or experiment.learner.memory is None:
        return torch.empty(0, dtype=torch.int64)
    earlier = site.data.task_indices("train", 0, site.task_range(stamp).start)
    known = learnt_hashes(_folders(site, stamp), stamp.task)
    fresh = ~np.isin(_hashes(site, earlier), known)
    return earlier[torch.from_numpy(fresh)]


def learnt_hashes(folders: list[Path], before_task: int) -> np.ndarray:
    """(n,) uint64 hashes in the files of the tasks before one."""
    found = [np.empty(0, dtype=np.uint64)]
    for folder in folders:
        for path in sorted(folder.glob("task-*.safetensors")):
            if int(path.stem.removeprefix("task-")) < before_task:
                found.append(read_safetensors(path)[0][VALUES].numpy().view(np.uint64))
    return np.unique(np.concatenate(found))


def _hashes(site: Site, rows: Tensor) -> np.ndarray:
    return site.data.keyed.values("learnt", rows.cpu().numpy())


def _folders(site: Site, stamp: Stamp) -> list[Path]:
    """Of this site; of all sites where they are simulated, among which records move as the data grow."""
    own = site.state(stamp.run).folder
    shared = site.identity.shared_models
    if shared is None:
        return [_folder(own)]
    return [_folder(folder) for folder in sorted(shared.parent.glob(f"*/runs/{own.name}"))]


def _folder(run: Path) -> Path:
    return run / FOLDER
