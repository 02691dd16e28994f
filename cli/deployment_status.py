"""perennial deploy status."""

from rich.console import Console
from rich.table import Table

from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.operations import node_statuses, progress, run_statuses, started_runs
from perennial.server.journal import EVENTS, read_events
from perennial.server.receipts import WENT_BACK
from perennial.server.roster import WRONG_NAME


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
    started = started_runs(folder)
    for name, ids in started.items():
        event = progress(folder, name)
        last = " ".join(f"{key}={event[key]}" for key in ("event", "task", "round") if key in event)
        runs.add_row(name, ids[-1], statuses.get(ids[-1], "unknown"), last or "-")
    console.print(runs)
    for text in name_faults(folder, [name for name, ids in started.items() if ids]):
        console.print(text, markup=False, soft_wrap=True)


def name_faults(folder: OperatorFolder, runs: list[str]) -> list[str]:
    """Print what the journals say of sites under a name that is not theirs and of lost ledgers, each once."""
    found: dict[str, None] = {}
    for name in runs:
        path = folder.state / "runs" / name
        for event in read_events(path) if (path / EVENTS).is_file() else ():
            if event["event"] == "note" and any(words in event["text"] for words in (WRONG_NAME, WENT_BACK)):
                found[f"run {name}: {event['text']}"] = None
    return list(found)
