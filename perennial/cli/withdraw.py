"""perennial site withdraw: from a run, records of it, or the digests that the site lends."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError
from perennial.foundation.files import replace_file

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.client.site import Site
    from perennial.config.site import Answer

OUTPUT = Path("records.safetensors")


def withdraw(
    path: Annotated[Path, typer.Argument(help="site.yaml, or the folder of a simulated run")],
    records: Annotated[
        list[Path] | None, typer.Argument(help="records to take back: image files, CSV tables, .npz arrays")
    ] = None,
    run: Annotated[str, typer.Option(help="the whole run: its token, as `perennial ledger` shows it")] = "",
    digests: Annotated[bool, typer.Option("--digests", help="lend no digests any more")] = False,
    patients: Annotated[
        Path | None, typer.Option(help="all records of these patients: a text file, one a line")
    ] = None,
    form: Annotated[
        Path | None, typer.Option(help="of records: the operator makes it with `perennial withdraw --form`")
    ] = None,
    site: Annotated[str, typer.Option(help="of a simulated run: which site")] = "",
    output: Annotated[Path, typer.Option(help="of records: file for the operator")] = OUTPUT,
) -> None:
    """Withdraw from a run, take records back from a finished closed-form run, or lend no digests any more."""
    if sum((bool(run), digests, bool(records), patients is not None)) != 1:
        raise ConfigError("withdraw: give one of --run TOKEN, --digests, --patients FILE, or the records")
    if run:
        lines = _of_run(path, run)
    elif digests:
        lines = _of_digests(path)
    else:
        opened = _of_a_run(path, site) if path.is_dir() else _load_site(path, form)
        lines = _of_records(*opened, records or [], patients, output)
    for line in lines:
        typer.echo(line)


def _of_run(path: Path, run: str) -> Iterator[str]:
    from perennial.client.consent import withdraw
    from perennial.config.site import load_site_config

    size = withdraw(load_site_config(path).state_dir, run)
    yield f"withdrawn: {size / 1e6:.1f} MB removed, and nothing of this run is answered again"
    yield "what had left before stays in the ledger"
    yield "of a closed form the operator takes it out of the model: perennial withdraw RUN --site NAME"


def _of_digests(path: Path) -> Iterator[str]:
    from perennial.cli.withdraw import stop_answering

    stop_answering(path, "digest")
    yield f"{path}: policy.answers names digest no more; the server deletes its digests at the next reply"


def _of_records(
    site: "Site",
    token: str,
    current: Mapping[int, str],
    records: Sequence[Path],
    patients: Path | None,
    output: Path,
) -> Iterator[str]:
    from perennial.strategies.analytic.withdrawn_records import write_withdrawn_sums

    by_task = write_withdrawn_sums(site, token, _select_records(site, records, patients), output, current)
    samples = sum(part.samples for part in by_task.values())
    yield f"{output}: sums of {samples} training samples, of {len(by_task)} tasks"
    yield f"the operator gives: perennial withdraw RUN --site {site.name} --records {output.name}"
    yield "remove these records from this site's data too, or the next run has them again"


def _select_records(site: "Site", records: Sequence[Path], patients: Path | None) -> "Tensor":
    import torch

    from perennial.data.deployed import merge_site_config
    from perennial.data.inputs import read_inputs
    from perennial.data.samples import find_stored_type
    from perennial.strategies.analytic.withdrawn_records import of_contents, of_patients

    if patients is not None:
        names = [line.strip() for line in patients.read_text().splitlines() if line.strip()]
        return of_patients(site, names)
    data, config, own = site.data, site.identity.experiment.data, site.identity.own_data
    config = config if own is None else merge_site_config(config, own)
    fill = data.mean if data.fill is None else data.fill
    read = read_inputs(records, data.input_shape, find_stored_type(data.x), fill, config, data.columns)
    return of_contents(site, torch.cat([x for _, x in read]))


def _of_a_run(folder: Path, site: str) -> "tuple[Site, str, Mapping[int, str]]":
    """A simulated site, whose data and state lie on this machine."""
    from perennial.client.identity import Identity
    from perennial.client.site import open_site
    from perennial.config.site import ANSWERS, SitePolicy
    from perennial.server.checkpoint import load_checkpoint
    from perennial.server.run_folder import CHECKPOINT

    if not site:
        raise ConfigError("--site: missing; a run's folder has several sites")
    checkpoint, _ = load_checkpoint(folder / CHECKPOINT)
    experiment = checkpoint.read_experiment()
    policy = SitePolicy(answers=list(ANSWERS))
    identity = Identity(site, experiment, policy, folder / "sites" / site, "cpu", 1)
    from perennial.server.opened_run import OpenedRun

    return open_site(identity), checkpoint.progress.run, OpenedRun.open(folder).list_current_hashes(site)


def _load_site(path: Path, form: Path | None) -> "tuple[Site, str, Mapping[int, str]]":
    """A real site, whose data are divided as they were for the run, under the experiment that it approved."""
    from perennial.client.door import read_withdrawal_form
    from perennial.client.identity import Identity
    from perennial.client.site import open_site
    from perennial.config.approval import load_approved_experiment
    from perennial.config.site import load_site_config

    if form is None:
        raise ConfigError("--form: missing; a site takes part in several runs")
    config, asked = load_site_config(path), read_withdrawal_form(form)
    with plugins.use_only(config.plugins):
        where = f"{form}: experiment"
        experiment = load_approved_experiment(asked.experiment, where, config.approvals, config.plugins)
        identity = Identity.of_site(config, experiment)
        asked.check(identity.state_dir)
        return open_site(identity, split_key=asked.split_key), asked.run, asked.current


def stop_answering(path: Path, answer: "Answer") -> None:
    """Remove one kind of request from policy.answers of a site.yaml; comments and all else stay.

    Raises ConfigError if the file does not list it under a key `answers` of its own.
    """
    import yaml

    from perennial.config.site import load_site_config

    before = load_site_config(path)
    text = path.read_text(encoding="utf-8")
    node = yaml.compose(text, yaml.SafeLoader)
    for key in ("policy", "answers"):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    listed = node if isinstance(node, yaml.SequenceNode) and node.value else None
    if listed is None or answer not in before.policy.answers:
        raise ConfigError(f"{path}: policy.answers: does not name {answer!r}")
    left = [kind for kind in before.policy.answers if kind != answer]
    # a list that is written in lines ends where the next key begins: its last item is its end
    end = listed.end_mark.index if listed.flow_style else listed.value[-1].end_mark.index
    changed = f"{text[: listed.start_mark.index]}[{', '.join(left)}]{text[end:]}"
    if not listed.flow_style:
        changed = text[: listed.start_mark.index].rstrip() + f" [{', '.join(left)}]{text[end:]}"
    after = yaml.safe_load(changed)
    if after != _drop_answer(yaml.safe_load(text), answer):
        raise ConfigError(f"{path}: policy.answers: cannot be changed without changing more; edit it by hand")
    replace_file(path, changed.encode(), mode=path.stat().st_mode & 0o777)


def _drop_answer(content: dict[str, dict[str, list[str]]], answer: str) -> object:
    kept = [kind for kind in content["policy"]["answers"] if kind != answer]
    return content | {"policy": content["policy"] | {"answers": kept}}
