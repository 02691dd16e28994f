"""MLflow: a run's figures and settings in the tracking store that MLFLOW_TRACKING_URI names."""

from pathlib import Path
from typing import Any

from perennial.foundation.errors import PerennialError
from perennial.foundation.files import replace_file
from perennial.server.tracking.figures import figures

RECORD = "mlflow_run_id"
"""In a run's folder: which MLflow run a resumed one goes on with."""


class MLflow:
    """A listener of the journal. name: of the experiment. settings: dotted keys, kept as parameters."""

    def __init__(self, folder: Path, name: str, settings: dict[str, str]) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise PerennialError(
                "track: mlflow needs the extra mlflow: pip install perennial[mlflow]"
            ) from None
        self._client = MlflowClient()
        record = folder / RECORD
        if record.exists():
            self._run = record.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        replace_file(record, self._run.encode(), mode=0o644)
        for key, value in settings.items():
            self._client.log_param(self._run, key, value[:500])

    def __call__(self, event: dict[str, Any]) -> None:
        for name, value, step in figures(event):
            self._client.log_metric(self._run, name, value, step=step)
        if event["event"] == "run_finished":
            self._client.set_terminated(self._run)
