"""perennial deploy: what an operator does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.deploy.app_container import Half

if TYPE_CHECKING:
    from perennial.deploy.federation import OperatorFolder

app = typer.Typer(
    suggest_commands=False,
    no_args_is_help=True,
    help="For the operator: a federation's keys, sites and runs.",
)
Folder = Annotated[Path, typer.Option("--folder", help="the federation's folder")]
Site = Annotated[str, typer.Argument(help="the site's name")]
Run = Annotated[str, typer.Argument(help="the run's name")]
Device = Annotated[str, typer.Option(help="for aggregation and central evaluation: auto, cpu or cuda")]
ExperimentFile = Annotated[Path, typer.Argument(help="experiment.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE")]
RunName = Annotated[str, typer.Option(help="of the run; default: the experiment's")]
FolderHere = Annotated[Path, typer.Argument(help="the federation's folder")]
Only = Annotated[Half | None, typer.Option(help="in containers: one half, with the keys or with the apps")]
HERE = Path()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="a new folder for everything of this federation")],
    host: Annotated[
        list[str], typer.Option(help="name or address by which sites reach the SuperLink; repeat")
    ],
    name: Annotated[str, typer.Option(help="of the federation; default: the folder's")] = "",
    runtime: Annotated[str, typer.Option(help="compose (containers) or process")] = "compose",
    days: Annotated[int, typer.Option(help="validity of the server's certificate")] = 365,
    fleet_port: Annotated[int, typer.Option(help="where sites connect")] = 9092,
    control_port: Annotated[int, typer.Option(help="of the Control API, on loopback")] = 8000,
) -> None:
    """Make a federation: certificate authority, server certificate, compose file, settings."""
    from perennial.config.yaml_file import validate
    from perennial.deploy.bundle import write_operator_files
    from perennial.deploy.certificates import read_validity
    from perennial.deploy.federation import Federation, create_operator_folder

    facts = {
        "name": name or folder.absolute().name,
        "hosts": host,
        "runtime": runtime,
        "fleet_port": fleet_port,
        "control_port": control_port,
    }
    made = create_operator_folder(folder, validate(Federation, facts, "perennial deploy init"), days)
    write_operator_files(made)
    for authority in read_validity(made.authority_certificate):
        typer.echo(f"ca.crt: {authority.identified}")
    for certificate in read_validity(made.certificates / "server.pem"):
        typer.echo(f"server.pem: {certificate}")
    typer.echo(f"keep {made.authority_key} safe: whoever has it can pose as this federation")


@app.command()
def add_site(
    sites: Annotated[
        list[str],
        typer.Argument(help="NAME KEY.pub, with the file that the site made, or NAME alone; repeat"),
    ],
    folder: Folder = HERE,
) -> None:
    """Let sites in, and write the bundle that each receives; said again, write newer bundles."""
    from perennial.deploy.operations import add_site as add

    operator, keys = _open(folder), dict[str, Path | None]()
    for word in sites:
        if word.endswith(".pub") and keys and keys[name := list(keys)[-1]] is None:
            keys[name] = Path(word)
        else:
            keys[word] = None
    for name, key in keys.items():
        for line in add(operator, name, key):
            typer.echo(line)


@app.command()
def revoke(name: Site, folder: Folder = HERE) -> None:
    """Shut a site out: its next message is refused."""
    from perennial.deploy.operations import revoke as revoke_site

    revoke_site(_open(folder), name)
    typer.echo(f"{name}: revoked; to let it back, add-site with a new key")


@app.command()
def stage(
    experiment: ExperimentFile, overrides: Overrides = None, name: RunName = "", folder: Folder = HERE
) -> None:
    """Build the app of an experiment without running it, for sites to review and approve."""
    from perennial.deploy.operations import stage as stage_experiment

    application = stage_experiment(_open(folder), experiment, overrides or [], name)
    typer.echo(f"{application.fab}\n{application.digest}")


@app.command()
def submit(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    name: RunName = "",
    device: Device = "auto",
    split_key: Annotated[
        str, typer.Option(help="64 hexadecimal digits: the key of the sites' splits, to compare two runs")
    ] = "",
    folder: Folder = HERE,
) -> None:
    """Start a run of an experiment over the registered sites; said twice, it starts one."""
    from perennial.deploy.operations import submit as submit_experiment

    typer.echo(submit_experiment(_open(folder), experiment, overrides or [], name, device, split_key))


@app.command()
def status(
    folder: Folder = HERE,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts, as JSON")] = False,
) -> None:
    """Show certificates, sites, runs, and what is wrong: whose turn it is and which command ends it."""
    from perennial.cli.deployment_status import print_status

    print_status(_open(folder), as_json)


@app.command()
def logs(
    name: Run,
    follow: Annotated[bool, typer.Option(help="go on as lines come")] = False,
    folder: Folder = HERE,
) -> None:
    """Print the log of a run's ServerApp."""
    from perennial.deploy.control import stream_log
    from perennial.deploy.operations import last_run

    operator = _open(folder)
    for text in stream_log(operator, last_run(operator, name, logs=True), follow=follow):
        typer.echo(text, nl=not follow)


@app.command()
def resume(name: Run, device: Device = "auto", folder: Folder = HERE) -> None:
    """Resume a run that was paused, stopped or killed, from its last finished round."""
    from perennial.deploy.operations import resume as resume_run

    typer.echo(resume_run(_open(folder), name, device))


@app.command()
def pause(name: Run, folder: Folder = HERE) -> None:
    """Pause a run after its current round until `resume`; a restart does not end the pause."""
    from perennial.deploy.operations import pause as pause_run

    typer.echo(pause_run(_open(folder), name))


@app.command()
def stop(name: Run, folder: Folder = HERE) -> None:
    """Stop a run; it can be resumed."""
    from perennial.deploy.operations import stop as stop_run

    typer.echo(stop_run(_open(folder), name))


@app.command()
def rotate(
    days: Annotated[int, typer.Option(help="validity of the new server certificate")] = 365,
    host: Annotated[list[str] | None, typer.Option(help="replace the names that it is for; repeat")] = None,
    authority: Annotated[
        bool, typer.Option(help="make a new authority too; every site then needs a new bundle")
    ] = False,
    folder: Folder = HERE,
) -> None:
    """Renew the server's certificate, and the authority if wanted; restart the SuperLink then."""
    from perennial.deploy.certificates import read_validity

    operator = _open(folder)
    operator.renew_server(days, tuple(host or ()), new_authority=authority)
    for trusted in read_validity(operator.certificates / "ca.crt"):
        typer.echo(f"ca.crt: {trusted.identified}")
    for certificate in read_validity(operator.certificates / "server.pem"):
        typer.echo(f"server.pem: {certificate}")
    typer.echo("restart the SuperLink to use it; runs go on with `perennial deploy resume`")
    if authority:
        typer.echo("send every site a new bundle: with its old ca.crt it does not reach the SuperLink then,")
        typer.echo("and restart its SuperNode. Until your restart, other commands do not reach the SuperLink")


@app.command()
def start(folder: FolderHere = HERE, only: Only = None) -> None:
    """Run the SuperLink and what runs ServerApps, in the foreground."""
    from perennial.deploy.superlink import start_superlink

    start_superlink(_open(folder), only)


@app.command()
def health(folder: FolderHere = HERE) -> None:
    """Ask the running SuperLink whether it serves (for health checks)."""
    from perennial.deploy.control import list_runs

    list_runs(_open(folder))


def _open(folder: Path) -> "OperatorFolder":
    """A federation's folder, with the files that are derived from deploy.yaml as it is now."""
    from perennial.deploy.bundle import write_operator_files
    from perennial.deploy.federation import OperatorFolder

    operator = OperatorFolder(folder)
    write_operator_files(operator)
    return operator
