"""A run's figures live in a dashboard: TensorBoard, MLflow or Weights & Biases, by one callback."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perennial import Callback, run

EXPERIMENT = {
    "name": "watched",
    "data": {"source": "digits", "sites": 3, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
}


class Dashboard(Callback):
    """log: takes figures by name, and the number of rounds so far."""

    def __init__(self, log: Callable[[dict[str, float], int], object]) -> None:
        self.log, self.rounds = log, 0

    def on_round(self, entry: Mapping[str, Any]) -> None:
        self.rounds = entry["round"]
        names = "train_loss", "accuracy", "bytes_up", "bytes_down", "seconds"
        self.log({name: entry[name] for name in names if entry[name] is not None}, self.rounds)

    def on_task(self, entry: Mapping[str, Any]) -> None:
        if entry["average_accuracy"] is not None:
            self.log({"average_accuracy": entry["average_accuracy"]}, self.rounds)


def tensorboard(folder: Path) -> Dashboard:
    """`pip install tensorboard`, then `tensorboard --logdir FOLDER`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    return Dashboard(lambda figures, step: [writer.add_scalar(*each, step) for each in figures.items()])


def mlflow() -> Dashboard:
    """`pip install mlflow`; figures go where MLFLOW_TRACKING_URI says."""
    import mlflow  # pyright: ignore[reportMissingImports]

    return Dashboard(lambda figures, step: mlflow.log_metrics(figures, step=step))


def wandb(project: str) -> Dashboard:
    """`pip install wandb`; figures leave this machine, unless WANDB_MODE is offline."""
    import wandb  # pyright: ignore[reportMissingImports]

    session = wandb.init(project=project)
    return Dashboard(lambda figures, step: session.log(figures, step=step))


def main(folder: Path) -> None:
    """Run with a callback that prints, and with TensorBoard where it is installed."""
    callbacks = [Dashboard(lambda figures, step: print(step, figures))]
    try:
        callbacks.append(tensorboard(folder / "tensorboard"))
    except ImportError as error:
        print(f"without TensorBoard ({error})")
    run(EXPERIMENT, runs=folder / "runs", callbacks=callbacks)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
