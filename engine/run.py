"""Running an experiment on this machine: the ServerApp's main over an in-process grid."""

from flwr.app import Context, RecordDict

from config.run import RunSettings
from config.simulation import simulated_site_names
from engine.grid import InProcessGrid, Listener, set_task_identity, site_contexts


def run_in_process(
    settings: RunSettings, workers: int = 1, listener: Listener | None = None
) -> dict[str, object]:
    """Run (or resume) to the end; returns the summary. settings.experiment must be an absolute path or in the
    app.

    workers: processes that the sites are spread over; the result is the same for any number.
    """
    from client.app import app as client_app
    from server.app import serve

    set_task_identity()
    run_config = dict(vars(settings))
    experiment = settings.load()
    contexts = site_contexts(len(simulated_site_names(experiment)), run_config)
    if workers > 1:
        from engine.workers import WorkerGrid

        grid: InProcessGrid = WorkerGrid(client_app, contexts, workers)
    else:
        grid = InProcessGrid(client_app, contexts)
    try:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
        return serve(grid, context, engine="in-process", listener=listener)
    finally:
        grid.close()
