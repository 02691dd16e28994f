"""Takes out the sums that sites of a finished closed-form run gave of records that have changed since.

The next exchange asks for what is missing, so that exactly the changed records are subtracted and added: sums
are integers, and the others of the same site come back as they were.
"""

from collections.abc import Collection
from pathlib import Path

from perennial.config.experiment import Experiment
from perennial.learning.analytic.files import PARTS
from perennial.server.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from perennial.server.run_folder import CHECKPOINT
from perennial.strategies.analytic.kept import FOLDER
from perennial.strategies.analytic.method import Analytic
from perennial.strategies.factory import build_strategy


def _strategy(checkpoint: Checkpoint) -> Analytic | None:
    """The run's closed form, if one site's sums can be taken out of it."""
    experiment = Experiment.model_validate(checkpoint.experiment)
    found = build_strategy(experiment.strategy.name, experiment.strategy.parameters).find(Analytic)
    able = experiment.secure is None and not experiment.privacy.enabled
    if found is None or not able or not found.keep_sites or found.head == "balanced_ridge":
        return None
    found.load_state_dict(checkpoint.strategy)
    return found


def withdrawable(run: Path) -> bool:
    """Whether a run's folder stores sums by site, so that one site's can be taken out."""
    return _strategy(load_checkpoint(run / CHECKPOINT)[0]) is not None


def ask_again(run: Path, stale: Collection[tuple[int, str]], *, grows: bool) -> None:
    """Take the sums of some (task, site) out of a finished run, which then begins again and asks for them.

    grows: whether it goes on with a new task instead. Raises StateError if stored sums are missing.
    """
    checkpoint, _ = load_checkpoint(run / CHECKPOINT)
    strategy = _strategy(checkpoint)
    assert strategy is not None
    sums = strategy.kept_sums
    sums.folder = run / FOLDER
    for task, site in stale:
        if sums.has(task, site) and sums.total is not None:
            sums.total = sums.total - sums.kept(task, site)
            del sums.contributions[task][site]
    if not any(sums.contributions.values()):
        sums.total = None
    gone = {f"all-{part}" for part in (*PARTS, "classes")}
    kept = {name: value for name, value in checkpoint.strategy.items() if name not in gone}
    state = kept | sums.state("all") | ({} if grows else {"tried": []})
    arrays = checkpoint.arrays
    if not grows:
        checkpoint.progress.begun_again()
        arrays = {}
    save_checkpoint(run / CHECKPOINT, Checkpoint(checkpoint.progress, checkpoint.experiment, arrays, state))
