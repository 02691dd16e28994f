"""The perennial command; what a command does is imported when it is called."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import perennial
from perennial.cli.deploy import app as deploy
from perennial.cli.evaluate import evaluate
from perennial.cli.export import export_command, weights
from perennial.cli.pages import serve
from perennial.cli.plugins_option import WithPlugins
from perennial.cli.predict import predict_command
from perennial.cli.privacy import attack_command, epsilon_command, ledger_command
from perennial.cli.site import app as site
from perennial.foundation.errors import ConfigError, PerennialError
from perennial.foundation.installation import require_own_package

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,  # Click itself suggests one
    pretty_exceptions_enable=False,
)


FORMER = {
    "pause": "deploy pause NAME",
    "unpause": "deploy resume NAME",
    "resume": "deploy resume NAME",
    "stop": "deploy stop NAME",
    "forget": "withdraw RUN --site NAME",
    "site go-on": "site resume",
    "site withdraw-records": "site withdraw PATH RECORDS",
    "site withdraw-digests": "site withdraw PATH --digests",
}


def find_file(path: Path | None) -> Path | None:
    """A file, or by its name alone an experiment that Perennial brings."""
    from perennial.config.run import find_experiment

    return path and find_experiment(path)


def print_version(asked: bool) -> None:
    """Print the version and end the command."""
    if asked:
        typer.echo(f"perennial {perennial.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Federated class-incremental learning that hospitals can run."""


app.add_typer(deploy, name="deploy")
app.add_typer(site, name="site")
app.add_typer(weights, name="weights")


@app.command(cls=WithPlugins)
def run(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="experiment.yaml, or a name such as quickstart; may be left out with --resume",
            callback=find_file,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. learner.epochs=3")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="replaces the experiment's seed")] = None,
    name: Annotated[str, typer.Option(help="of the run folder; default: the experiment's name")] = "",
    runs: Annotated[Path, typer.Option(help="folder of run folders")] = Path("runs"),
    seeds: Annotated[
        str, typer.Option(help="several seeds, for example 1:5; one table of means and intervals at the end")
    ] = "",
    sweep: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE,VALUE: a row of the table for each value; repeatable")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="processes that the sites are spread over, default 1; of --seeds and --sweep, runs at the "
            "same time, default one a processor",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; workers share all GPUs")] = "auto",
    resume: Annotated[
        Path | None, typer.Option(help="run folder to go on with; with a longer class list too")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="remove an earlier run of this name; without it the folder gets a number")
    ] = False,
    cohort: Annotated[
        str | None, typer.Option(help="sites that train in one pass: a number, or auto; default 1")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="graphs, benchmark, or both with a comma between: what makes a GPU faster")
    ] = "",
) -> None:
    """Run an experiment on this machine; with --seeds or --sweep, several, and put them into one table."""
    if seeds or sweep:
        alone = {"--resume": resume, "--seed": seed, "--cohort": cohort, "--gpu": gpu}
        for option, value in alone.items():
            if value not in (None, ""):
                raise ConfigError(f"{option}: found with --seeds or --sweep; allowed with a single run")
        if experiment is None:
            raise ConfigError("perennial run: give an experiment file")
        from perennial.engine.sweeps import run_sweep

        found = run_sweep(
            experiment,
            seeds=seeds or None,
            sweep=sweep or (),
            overrides=overrides or (),
            name=name,
            runs=runs,
            workers=workers,
            device=device,
            overwrite=overwrite,
            say=typer.echo,
        )
        typer.echo(f"\n{found}\n\ntable as text, CSV, LaTeX and PNG: {found.folder}")
        return
    from perennial.cli.start_up import import_run

    if resume is not None:
        from perennial.engine.run_folders import require_own_folder

        if overwrite:
            raise ConfigError(
                "--overwrite: found with --resume, which goes on with a run; allowed one of them"
            )
        require_own_folder(resume, name, runs)
        import_run()(experiment, overrides or [], seed, name, runs, workers or 1, device, resume, cohort, gpu)
        return
    if experiment is None:
        raise ConfigError("perennial run: give an experiment file, or --resume RUN")
    from perennial.config.experiment import load_experiment
    from perennial.engine.run_folders import create_run_folder

    # what is wrong in the file, and the folder, take no import of PyTorch to be known
    found = load_experiment(experiment, overrides, seed)
    with create_run_folder(name or found.name, runs, overwrite) as folder:
        run_command = import_run()
        run_command(
            experiment, overrides or [], seed, folder.name, runs, workers or 1, device, None, cohort, gpu
        )


@app.command()
def init(
    data: Annotated[Path, typer.Argument(help="folder of images, CSV table or list of images, or .npz file")],
    output: Annotated[Path, typer.Option(help="folder to write to")] = Path(),
    site: Annotated[str, typer.Option(help="name of this site, for site.yaml")] = "",
    label: Annotated[str | None, typer.Option(help="column of a table that is the class")] = None,
    site_column: Annotated[str | None, typer.Option(help="column of a table that is the site")] = None,
    patient: Annotated[
        str | None, typer.Option(help="column, or pattern in file names, of the patient")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="what a folder's levels are: class, or site/class")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="protect each record by noise at the sites; less is stronger"),
    ] = None,
    missing: Annotated[
        list[str] | None, typer.Option(help="a text of a table that means unknown; may be given again")
    ] = None,
    decimal: Annotated[str | None, typer.Option(help="decimal sign of a table: . or ,")] = None,
    units: Annotated[
        list[str] | None, typer.Option(help="COLUMN=UNIT behind a table's numbers; may be given again")
    ] = None,
    limits: Annotated[
        list[str] | None, typer.Option(help="a column in which <0.5 counts as 0.5; may be given again")
    ] = None,
) -> None:
    """Inspect data and write the files of a first run, with reasons as comments; asks what is not clear."""
    from perennial.cli.init import LAYOUTS, init_command

    if decimal not in (None, ".", ","):
        raise ConfigError(f"--decimal: found {decimal!r}, allowed . or ,")
    if wrong := [each for each in units or () if not each.partition("=")[2]]:
        raise ConfigError(f"--units: found {wrong[0]!r}, allowed COLUMN=UNIT")
    if layout not in (None, *LAYOUTS):
        raise ConfigError(f"--layout: found {layout!r}, allowed {', '.join(LAYOUTS)}")

    def ask(question: str, allowed: Sequence[str]) -> str:
        import click

        return typer.prompt(question, type=click.Choice(allowed))

    asked = ask if sys.stdin.isatty() else None
    behind = {column: unit for column, _, unit in (each.partition("=") for each in units or ())}
    cells = missing or (), decimal, behind, limits or ()
    told = init_command(data, output, site, label, site_column, patient, layout, asked, epsilon, *cells)
    for line in told:
        typer.echo(line)


@app.command(cls=WithPlugins)
def check(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="experiment.yaml, a name such as quickstart, or site.yaml; may be left out with --resume",
            callback=find_file,
        ),
    ] = None,
    experiment: Annotated[
        Path | None, typer.Option(help="for a site.yaml: the experiment it will take part in")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of an experiment, as for `perennial run`")
    ] = None,
    memory: Annotated[float, typer.Option(help="most memory to take for it, in GiB")] = 8.0,
    resume: Annotated[
        Path | None,
        typer.Option(help="run folder: what would happen if it went on with its data as they are"),
    ] = None,
) -> None:
    """Validate a file and what it points at, and say what would happen."""
    if resume is not None:
        from perennial.cli.check_resume import check_resume_command

        if overrides:
            raise ConfigError("--set: found with --resume; allowed with an experiment's file")
        check_resume_command(resume, path)
        return
    if path is None:
        raise typer.BadParameter("give an experiment.yaml or a site.yaml, or --resume RUN")
    from perennial.cli.check import check_command

    check_command(path, experiment, memory, overrides or [])


@app.command(cls=WithPlugins)
def withdraw(
    run: Annotated[Path, typer.Argument(help="folder of a run of strategy analytic")],
    site: Annotated[str, typer.Option(help="whose sums are subtracted")],
    records: Annotated[
        Path | None,
        typer.Option(help="only these of its records: a file of `perennial site withdraw`"),
    ] = None,
    form: Annotated[
        Path | None, typer.Option(help="withdraw nothing; write what the site needs for --records")
    ] = None,
    shrinkage: Annotated[
        float | None,
        typer.Option(help="of the new head, where validation chose the old one; else the sites choose again"),
    ] = None,
) -> None:
    """Withdraw a site, or some of its records, from a closed-form model, exactly."""
    from perennial.server import withdrawal

    if form is not None:
        typer.echo(withdrawal.write_form(run, site, form))
    elif records is not None:
        typer.echo(withdrawal.withdraw_records(run, site, records, shrinkage))
    elif (statements := withdrawal.withdraw(run, site, shrinkage)) is not None:
        typer.echo(statements)
        for path in withdrawal.list_leftovers(run):
            typer.echo(f"{run / path}: may still hold the model before")
    else:
        for line in withdrawal.describe_next_steps(run, site):
            typer.echo(line)


@app.command(cls=WithPlugins)
def verify(
    statements: Annotated[Path, typer.Argument(help="statements.json of a closed-form run, or its folder")],
    keys: Annotated[Path | None, typer.Option(help="sites' keys that you know, one a line")] = None,
) -> None:
    """Check that a closed-form model follows from the sums that sites signed, and solve it again."""
    from perennial.server.verification import read_keys, verify

    for line in verify(statements, None if keys is None else read_keys(keys)):
        typer.echo(line)


@app.command(cls=WithPlugins)
def report(
    run: Annotated[Path, typer.Argument(help="run folder")],
    prevalence: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE: say predictive values where a class is so frequent"),
    ] = None,
) -> None:
    """Write report.html of a run again; with --prevalence say what answers are worth there."""
    from perennial.server.measures.headline import describe_run_prevalence
    from perennial.server.report.write import write_report

    for sentence in describe_run_prevalence(run, prevalence or []):
        typer.echo(sentence)
    typer.echo(write_report(run))


app.command()(serve)
app.command("predict", cls=WithPlugins)(predict_command)
app.command("export", cls=WithPlugins)(export_command)
app.command("epsilon", cls=WithPlugins)(epsilon_command)
app.command("ledger")(ledger_command)
app.command("attack", cls=WithPlugins)(attack_command)


@app.command(cls=WithPlugins)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders; seeds of one experiment are put together")],
) -> None:
    """Table over runs: mean and deviation over seeds, and differences seed by seed."""
    from perennial.server.report.comparison import compare as compare_runs

    finished = [folder for folder in runs if (folder / "summary.json").exists()]
    for folder in runs if finished else ():
        if folder not in finished:
            typer.echo(f"left out: {folder} holds no finished run", err=True)
    typer.echo(compare_runs(finished or runs))


app.command(cls=WithPlugins)(evaluate)


@app.command(cls=WithPlugins)
def card(
    run: Annotated[Path, typer.Argument(help="run folder")],
    intended_use: Annotated[
        Path | None, typer.Option(help="text file: what the model is for, in the words of who answers for it")
    ] = None,
) -> None:
    """Write card.md: intended use, data by site, measures, privacy, limits, hashes."""
    from perennial.server.report.card import write_card

    typer.echo(write_card(run, intended_use))


@app.command()
def schema(
    site: Annotated[bool, typer.Option("--site", help="of site.yaml; without it of experiment.yaml")] = False,
) -> None:
    """Print the JSON schema of a file, by which an editor completes keys and marks mistakes."""
    import json

    if site:
        from perennial.config.site import SiteConfig as Model
    else:
        from perennial.config.experiment import Experiment as Model
    typer.echo(json.dumps(Model.model_json_schema(), indent=1))


def refuse_former(words: list[str]) -> None:
    """Raises ConfigError with the new name if the words begin with a command that was renamed."""
    for former, present in FORMER.items():
        if words[: len(former.split())] == former.split():
            raise ConfigError(f"{former}: the command is now `perennial {present}`")


def main() -> None:
    """Entry point: prints a PerennialError as one message; any other error keeps its traceback."""
    try:
        require_own_package()
        refuse_former(sys.argv[1:])
        app()
    except PerennialError as error:
        typer.echo(f"perennial: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
