"""Finished runs whose networks an experiment uses as fixed maps: where the files lie, what they hold."""

from pathlib import Path
from typing import Any

from perennial.config.yaml_file import beside


def locate_runs(model: Any, folder: Path) -> None:
    """Make the file of each map of a finished run absolute, and write down what it holds.

    Raises ConfigError when a file cannot be read, or is not the model of a run that learnt features.
    """
    features = model.get("features") if isinstance(model, dict) else None
    for found in features if isinstance(features, list) else ():
        if isinstance(found, dict) and found.get("name") == "model" and isinstance(found.get("file"), str):
            # here, because it takes PyTorch, which no other experiment needs to be read
            from perennial.models.feature_maps.finished_run import written_down

            found["file"] = beside(folder, found["file"])
            written_down(found)
