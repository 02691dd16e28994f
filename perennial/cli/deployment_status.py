"""perennial deploy status."""

import json
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from perennial.deploy.certificates import read_validity
from perennial.deploy.control import FlowerRun, RunBook, list_runs
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.superlink import SuperLinkStatus, read_superlink_status
from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import SILENT_AFTER, last_beat
from perennial.live.diagnosis import find_faults
from perennial.live.run_state import RunState
from perennial.server.control import locate_heartbeat
from perennial.server.faults import Fault, group_faults, rank_faults

RUN = ("run", "Flower's run", "status", "last event")
PATIENCE = 60.0
"""Seconds within which a submitted run is begun."""


def print_status(folder: OperatorFolder, as_json: bool) -> None:
    """Certificates, sites, runs and what is wrong, as a person reads them or as JSON."""
    facts, faults = read_status(folder)
    if as_json:
        found = [{**fault.collect_facts(), "detail": fault.detail} for fault in faults]
        typer.echo(json.dumps({**facts, "faults": found}, indent=1))
        return
    console = Console(highlight=False)
    for line in facts["certificates"]:
        console.print(line, markup=False, soft_wrap=True)
    for title, columns in (("sites", ("site", "state", "node", "now")), ("runs", RUN)):
        table = Table(*columns, title=title, title_justify="left")
        for row in facts[title]:
            table.add_row(*row.values())
        console.print(table)
    for fault in group_faults(faults):
        console.print(f"{fault.said} {fault.turn}", markup=False, soft_wrap=True)
    if not faults:
        console.print("Nothing needs attention.")


def read_status(folder: OperatorFolder) -> tuple[dict[str, list[Any]], list[Fault]]:
    """(certificates, sites and runs with what Flower knows of each; faults, the most urgent first)."""
    runs, sites, book = folder.state / "runs", folder.sites(), RunBook(folder.apps)
    said, served = read_superlink_status(runs), read_validity(folder.certificates / "server.pem")
    others = {name: site.state for name, site in sites.items() if site.state != "registered"}
    ends = min(certificate.ends for certificate in served).timestamp()
    listed: dict[str, FlowerRun] = {}
    if said is not None and said.alive:
        try:
            listed = list_runs(folder)
        except StateError as error:  # it died after its last heartbeat
            typer.echo(str(error), err=True)
            said = said.model_copy(update={"silent_for": math.inf})
    ids = book.find_owners(listed)
    superlink = SuperLinkStatus(certificate_ends=ends) if said is None else said
    superlink = superlink.model_copy(update={"others": others, "unknown": book.find_unknown(listed)})
    states = {name: RunState(runs / name) for name in ids if (runs / name).is_dir()}
    for state in states.values():
        state.read()
    faults = find_faults(superlink, states.values())
    faults += _find_faults_here(
        folder, superlink, {name: _find_status(listed, started) for name, started in ids.items()}
    )
    authorities = read_validity(folder.certificates / "ca.crt")
    facts: dict[str, list[Any]] = {
        "certificates": [f"ca.crt: {one.identified}" for one in authorities]
        + [f"server.pem: {one}" for one in served],
        "sites": [
            {
                "site": name,
                "state": site.state,
                "node": site.node or "-",
                "now": _describe_connection(superlink, name),
            }
            for name, site in sites.items()
        ],
        "runs": [
            dict(
                zip(
                    RUN,
                    (
                        name,
                        started[-1] if started else "-",
                        _find_status(listed, started),
                        _last(folder, name),
                    ),
                    strict=True,
                )
            )
            for name, started in ids.items()
        ],
    }
    return facts, rank_faults(faults)


def _find_status(listed: dict[str, FlowerRun], started: list[str]) -> str:
    """Flower's status of the newest start."""
    if not started:
        return "not taken"
    return listed[started[-1]].status if started[-1] in listed else "unknown"


def _describe_connection(superlink: SuperLinkStatus, site: str) -> str:
    """Whether a site's SuperNode is connected."""
    if not superlink.alive or site not in superlink.sites:
        return "-"
    since = superlink.sites[site]
    return "online" if since is None else "offline" if since else "never connected"


def _find_faults_here(
    folder: OperatorFolder, superlink: SuperLinkStatus, runs: dict[str, str]
) -> Iterator[Fault]:
    """What this machine and Flower's Control API alone can tell. runs: Flower's status by name."""
    for name, status in runs.items():
        if (
            status in ("pending", "starting")
            and time.time() - RunBook(folder.apps).path(name).stat().st_mtime > PATIENCE
        ):
            yield Fault("superexec", run=name)
    beat = last_beat(locate_heartbeat(folder.state / "runs"))
    if beat is not None and beat > SILENT_AFTER:
        yield Fault("pages", since=time.time() - beat)
    federation = folder.federation
    if not superlink.alive and federation.runtime == "process":
        for port in (federation.fleet_port, federation.control_port):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    yield Fault("superlink_port", detail=f"Port {port}.", key=str(port))


def _last(folder: OperatorFolder, name: str) -> str:
    """The last event of a run's journal, in words."""
    path = folder.state / "runs" / name / "events.jsonl"
    for line in reversed(path.read_text(encoding="utf-8").splitlines() if path.is_file() else []):
        try:
            event = json.loads(line)
        except ValueError:  # a line that is being written
            continue
        return " ".join(f"{key}={event[key]}" for key in ("event", "task", "round") if key in event) or "-"
    return "-"
