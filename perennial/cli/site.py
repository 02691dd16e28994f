"""perennial site: what a hospital's engineer does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.cli.pages import serve_site
from perennial.cli.withdraw import withdraw
from perennial.deploy.app_container import Half
from perennial.foundation.errors import ConfigError

if TYPE_CHECKING:
    from perennial.config.site import SiteConfig
    from perennial.deploy.application import Offer
    from perennial.privacy.ledger import Ledger

app = typer.Typer(
    suggest_commands=False,
    no_args_is_help=True,
    help="At a hospital: keys, the operator's bundle, approvals, the SuperNode.",
)
SiteFile = Annotated[Path, typer.Argument(help="site.yaml")]
Only = Annotated[Half | None, typer.Option(help="in containers: one half, with the keys or with the apps")]


@app.command(name="open")
def open_(
    bundle: Annotated[
        Path | None, typer.Argument(help="NAME.tar.gz from the operator; without it, make this site's key")
    ] = None,
    sha256: Annotated[
        str, typer.Argument(help="approve the app with this SHA-256, as the operator told it by another way")
    ] = "",
    folder: Annotated[Path, typer.Option(help="this site's folder")] = Path(),
) -> None:
    """Make this site's key pair, or unpack the operator's bundle; site.yaml and a key that exist are kept."""
    from perennial.deploy.bundle import find_offered_app, open_bundle
    from perennial.deploy.certificates import (
        compute_fingerprint,
        encode_public_line,
        make_node_key,
        read_validity,
        write_node_key,
    )

    if bundle is None:
        key, path = make_node_key(), folder / "node.key"
        write_node_key(key, path)
        typer.echo(f"private key: {path} (stays here)")
        typer.echo(f"public key:  {path}.pub (send it to the operator)")
        typer.echo(f"fingerprint: {compute_fingerprint(encode_public_line(key))} (compare by telephone)")
        return
    for name in open_bundle(bundle, folder):
        typer.echo(f"{folder / name}")
    for authority in read_validity(folder / "ca.crt"):
        typer.echo(f"authority:   {authority.identified} (compare by telephone)")
    _tell_signing_key(folder / "site.yaml")
    if sha256:
        approve(find_offered_app(folder, sha256), sha256, folder / "site.yaml")


@app.command()
def approve(
    fab: Annotated[Path, typer.Argument(help="the app bundle, offered/*.fab")],
    sha256: Annotated[str, typer.Argument(help="its SHA-256, as the operator told it by another way")],
    site: Annotated[Path, typer.Option(help="site.yaml")] = Path("site.yaml"),
) -> None:
    """Show what an app asks for, and let exactly this experiment run here."""
    from perennial.config.site import load_site_config
    from perennial.deploy.application import approve as approve_app
    from perennial.deploy.application import read_offer, require_hash

    config = load_site_config(site)
    offer = read_offer(fab, config)
    _show(offer, config)
    require_hash(offer, sha256)
    approved = approve_app(offer, _locate_flower_home(site), config.approvals)
    typer.echo(f"{approved.app}: approved, with {approved.title}")


@app.command()
def review(
    fab: Annotated[Path, typer.Argument(help="the app bundle, offered/*.fab")],
    site: Annotated[Path, typer.Option(help="site.yaml")] = Path("site.yaml"),
) -> None:
    """Show what an app would ask of this site, and what that changes; approve nothing."""
    from perennial.config.site import load_site_config
    from perennial.deploy.application import read_offer

    config = load_site_config(site)
    _show(read_offer(fab, config), config)


@app.command()
def disapprove(
    name: Annotated[str, typer.Argument(help="as `perennial site check` lists it")],
    site: Annotated[Path, typer.Option(help="site.yaml")] = Path("site.yaml"),
) -> None:
    """Take an approval back."""
    from perennial.config.site import load_site_config
    from perennial.deploy.application import withdraw_approval as disapprove_app

    disapprove_app(name, _locate_flower_home(site), load_site_config(site).approvals)
    typer.echo(f"{name}: not approved any more")


@app.command()
def pause(path: SiteFile = Path("site.yaml")) -> None:
    """Answer nothing until `perennial site resume`; the operator reads that this site pauses."""
    from perennial.client.consent import pause as pause_site
    from perennial.config.site import load_site_config

    pause_site(load_site_config(path).state_dir)
    typer.echo("paused: every request is refused, and the operator reads so")


@app.command()
def resume(path: SiteFile = Path("site.yaml")) -> None:
    """Answer again after a pause."""
    from perennial.client.consent import resume as resume_site
    from perennial.config.site import load_site_config

    resume_site(load_site_config(path).state_dir)
    typer.echo("requests are answered again")


app.command()(withdraw)


app.command("serve")(serve_site)


@app.command()
def check(path: SiteFile = Path("site.yaml")) -> None:
    """Check key, certificates, approvals and connection; say what may leave and whether noise covers it."""
    from perennial.client.policy import describe_leaving
    from perennial.deploy.certificates import compute_fingerprint, encode_public_line
    from perennial.deploy.supernode import ALIVE, check_superlink, describe_port, read_setup
    from perennial.foundation.heartbeat import is_alive

    setup = read_setup(path)
    alive = is_alive(setup.config.state_dir / ALIVE)
    typer.echo(f"site:        {setup.config.site}, key {compute_fingerprint(encode_public_line(setup.key))}")
    _tell_signing_key(path)
    for authority in setup.authorities:
        typer.echo(f"authority:   {authority.identified}")
    for approved in setup.apps:
        typer.echo(f"approved:    {approved.app} ({approved.title})")
    for line in describe_leaving(setup.config.policy):
        typer.echo(line)
    typer.echo(f"supernode:   {describe_port(setup.connection, alive)}")
    check_superlink(setup, alive)
    address = setup.connection.superlink
    typer.echo(f"superlink:   {address} answers with a certificate that this site trusts, and knows its key")


@app.command()
def start(path: SiteFile = Path("site.yaml"), only: Only = None) -> None:
    """Run the SuperNode and what runs its apps, in the foreground."""
    from perennial.deploy.supernode import start_supernode

    start_supernode(path, only)


@app.command()
def clean(
    path: SiteFile = Path("site.yaml"),
    days: Annotated[
        float,
        typer.Option(help="remove what nothing used for so long; 0: of every run, also of one that goes on"),
    ] = 30.0,
    run: Annotated[
        str,
        typer.Option(
            metavar="TOKEN", help="remove this run alone, and free what it masked, once all its sites do so"
        ),
    ] = "",
) -> None:
    """Remove what the site keeps of old runs (exemplars, models, own layers), unused features and images."""
    from perennial.client.consent import HEX, TOKEN_SHOWN
    from perennial.client.secure_state import give_up
    from perennial.client.state import clean as remove
    from perennial.client.state import open_kept_features, remove_decoded
    from perennial.config.site import load_site_config
    from perennial.protocol.stamp import RUN_TOKEN

    if run and (len(run) != RUN_TOKEN or not set(run) <= HEX):
        raise ConfigError(f"--run: found {run!r}, allowed {RUN_TOKEN} hexadecimal digits; {TOKEN_SHOWN}")
    config = load_site_config(path)
    removed = remove(config.state_dir, days, run)
    for name, size in removed:
        typer.echo(f"removed:     run {name}, {size / 1e6:.1f} MB")
    if run:
        give_up(config.state_dir, run)
        typer.echo(f"given up:    run {run}; this site takes part in no masked sum of it any more")
        return
    if freed := open_kept_features(config.state_dir, config.state).remove_unused(days):
        typer.echo(f"removed:     features of samples, {freed / 1e6:.1f} MB")
    if freed := remove_decoded(config.state_dir, days):
        typer.echo(f"removed:     decoded images, {freed / 1e6:.1f} MB")
    typer.echo(f"{len(removed)} runs removed; the ledger and the count of requests stay")


@app.command()
def restart_ledger(
    path: SiteFile = Path("site.yaml"),
    as_it_is: Annotated[
        bool, typer.Option(help="the ledger is the newest one, and the file of ledger_tip was lost: note it")
    ] = False,
) -> None:
    """Begin a new ledger after one was lost, with the releases that the newest tip had counted."""
    ledger = _open_ledger(path)
    if as_it_is:
        typer.echo(f"{ledger.record_tip()} releases; noted in {ledger.elsewhere or ledger.beside}")
        return
    lost, carried = ledger.restart()
    typer.echo(f"{carried} releases carried over; what was left of the old ledger: {lost}")


@app.command()
def health(path: SiteFile = Path("site.yaml")) -> None:
    """Ask the running SuperNode whether it serves (for health checks)."""
    from perennial.deploy.supernode import check_health, read_connection

    check_health(read_connection(path))


def _show(offer: "Offer", site: "SiteConfig") -> None:
    """Print what an app asks for, and what changes against the newest approval of an experiment."""
    from perennial.config.approval import find_newest_approval
    from perennial.deploy.review import offer_in_words

    for line in offer_in_words(offer, site, find_newest_approval(site.approvals)):
        typer.echo(line)


def _tell_signing_key(path: Path) -> None:
    """Print the key that signs what this site sends, in the forms in which others pin it or check with it."""
    from perennial.client.secure_state import own_key
    from perennial.config.site import load_site_config
    from perennial.privacy.secure.keys import format_fingerprint

    config = load_site_config(path)
    key = own_key(config.state_dir)
    typer.echo(f"signing key: {format_fingerprint(key)} (for policy.peers of other sites, by telephone)")
    typer.echo(f"             {config.site} {key} (a line for `perennial verify --keys`)")


def _open_ledger(path: Path) -> "Ledger":
    """The ledger of a site.yaml, with the files that witness it."""
    from perennial.config.site import load_site_config

    return load_site_config(path).ledger


def _locate_flower_home(site: Path) -> Path:
    from perennial.config.site import FLOWER_HOME

    return site.absolute().parent / FLOWER_HOME
