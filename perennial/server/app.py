"""The ServerApp: opens the run's folder and drives the curriculum over a grid of any engine."""

from collections.abc import Callable
from logging import INFO, WARNING, getLogger
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from perennial.config.run import CohortPlan, RunSettings
from perennial.foundation import plugins
from perennial.foundation.files import sole_owner
from perennial.foundation.heartbeat import beating
from perennial.server.control import ALIVE, PAUSES, pause_in_words

app = ServerApp()
log = getLogger("flwr").log
ONE_BY_ONE = CohortPlan()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the ServerApp; Flower calls this."""
    name = type(grid).__name__
    engine = "ray" if name == "InMemoryGrid" else "grpc"
    serve(grid, context, engine, listener=log_event)


def log_event(event: dict[str, Any]) -> None:
    """Log one event of the journal as a line that `perennial deploy logs` shows."""
    match event["event"]:
        case "note":
            log(WARNING, event["text"])
        case "round":
            state = "skipped" if event["skipped"] else f"{len(event['participants'])} sites"
            log(INFO, f"task {event['task']} round {event['round']}: {state}, {event['seconds']:.1f} s")
            for found in (*event["dropped"], *event["refused"]):
                log(WARNING, f"{found['site']}: {found['reason']}")
        case "task_finished":
            average = event["average_accuracy"]
            known = "accuracy not measured" if average is None else f"average accuracy {average}"
            log(INFO, f"task {event['task']} learnt: {known}")
        case kind if kind in PAUSES:
            log(WARNING if kind == "paused" else INFO, pause_in_words(event))


def serve(
    grid: Grid,
    context: Context,
    engine: str,
    listener: Callable[[dict[str, Any]], None] | None = None,
    cohort: CohortPlan = ONE_BY_ONE,
) -> dict[str, Any]:
    """Run the experiment that the run config names, to its end; returns the summary.

    engine: in-process, ray or grpc, for the summary. listener: called with every event of the journal.
    cohort: how the grid lets sites train in one pass, for the summary.
    """
    import torch

    from perennial.server.assembly import run_to_the_end

    settings = RunSettings.from_run_config(context.run_config)
    with plugins.using(plugins.listed(settings.plugins)):
        experiment = settings.load()
        torch.set_num_threads(settings.threads)
        folder = settings.folder(experiment)
        with sole_owner(folder, f"server of {experiment.name}"), beating(folder / ALIVE):
            return run_to_the_end(grid, experiment, settings, folder, engine, listener, cohort)
