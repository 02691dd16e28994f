"""TensorBoard: a run's figures in RUN/tensorboard, for `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any

from perennial.foundation.errors import PerennialError
from perennial.server.tracking.figures import figures

FOLDER = "tensorboard"


class TensorBoard:
    """A listener of the journal. first_round: the next round of a run that goes on; 1 otherwise."""

    def __init__(self, folder: Path, first_round: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise PerennialError(
                "track: tensorboard needs the extra tensorboard: pip install perennial[tensorboard]"
            ) from None
        # what the stopped run wrote after its last checkpoint did not happen
        self._writer = SummaryWriter(
            str(folder / FOLDER), purge_step=first_round if first_round > 1 else None
        )

    def __call__(self, event: dict[str, Any]) -> None:
        for name, value, step in figures(event):
            self._writer.add_scalar(name, value, step)
        if event["event"] in ("task_finished", "run_finished"):
            self._writer.flush()
        if event["event"] == "run_finished":
            self._writer.close()
