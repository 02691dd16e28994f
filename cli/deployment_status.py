"""perennial deploy status."""

from rich.console import Console
from rich.table import Table

from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.operations import node_statuses, progress, run_statuses, started_runs


def print_status(folder: OperatorFolder) -> None:
    """Certificates, sites and runs, each with what Flower knows of it now."""
    console = Console(highlight=False)
    for authority in read_validity(folder.certificates / "ca.crt"):
        console.print(f"ca.crt: {authority.identified}", markup=False, soft_wrap=True)
    for certificate in read_validity(folder.certificates / "server.pem"):
        console.print(f"server.pem: {certificate}", markup=False, soft_wrap=True)
    nodes = node_statuses(folder)
    sites = Table("site", "state", "node", "now", title="sites", title_justify="left")
    for name, record in folder.sites().items():
        sites.add_row(name, record.state, record.node or "-", nodes.get(record.node, "-"))
    console.print(sites)
    statuses = run_statuses(folder)
    runs = Table("run", "Flower's run", "status", "last event", title="runs", title_justify="left")
    for name, started in started_runs(folder).items():
        event = progress(folder, name)
        last = " ".join(f"{key}={event[key]}" for key in ("event", "task", "round") if key in event)
        runs.add_row(name, started[-1], statuses.get(started[-1], "unknown"), last or "-")
    console.print(runs)
