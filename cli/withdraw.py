"""perennial site withdraw: from a run, records of it, or the digests that the site lends."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perennial.foundation.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.client.site import Site


def withdraw_command(
    path: Path,
    run: str,
    digests: bool,
    records: Sequence[Path],
    patients: Path | None,
    form: Path | None,
    experiment: Path | None,
    site: str,
    output: Path,
) -> Iterator[str]:
    """Withdraw what is asked for, and say what the operator does with it.

    Raises ConfigError naming an argument that is missing or one too many.
    """
    if sum((bool(run), digests, bool(records), patients is not None)) != 1:
        raise ConfigError("withdraw: give one of --run TOKEN, --digests, --patients FILE, or the records")
    if run or digests:
        yield from _of_run(path, run) if run else _of_digests(path)
        return
    from perennial.client.withdrawn_records import withdrawn

    opened, token, current = _of_a_run(path, site) if path.is_dir() else _at_a_site(path, form, experiment)
    chosen = _chosen(opened, records, patients)
    by_task = withdrawn(opened, token, chosen, output, current)
    samples = sum(part.samples for part in by_task.values())
    yield f"{output}: sums of {samples} training samples, of {len(by_task)} tasks"
    yield f"the operator gives: perennial withdraw RUN --site {opened.name} --records {output.name}"
    yield "remove these records from this site's data too, or the next run has them again"


def _of_run(path: Path, run: str) -> Iterator[str]:
    from perennial.client.consent import withdraw
    from perennial.config.site import load_site_config

    size, receipt = withdraw(load_site_config(path).state_dir, run)
    yield f"withdrawn: {size / 1e6:.1f} MB removed, and nothing of this run is answered again"
    yield "what had left before stays in the ledger"
    if receipt is not None:
        yield f"the operator gives: perennial withdraw RUN --site NAME --receipt {receipt}"


def _of_digests(path: Path) -> Iterator[str]:
    from perennial.config.site_edit import stop_answering

    stop_answering(path, "digest")
    yield f"{path}: policy.answers names digest no more; the server deletes its digests at the next reply"


def _chosen(site: "Site", records: Sequence[Path], patients: Path | None) -> "Tensor":
    import torch

    from perennial.client.withdrawn_records import of_contents, of_patients
    from perennial.data.inputs import read_inputs
    from perennial.data.samples import stored_as

    if patients is not None:
        names = [line.strip() for line in patients.read_text().splitlines() if line.strip()]
        return of_patients(site, names)
    data = site.data
    read = read_inputs(records, data.input_shape, stored_as(data.x), data.mean, data.columns)
    return of_contents(site, torch.cat([x for _, x in read]))


def _of_a_run(folder: Path, site: str) -> "tuple[Site, str, dict[int, str]]":
    """A simulated site, whose data and state lie on this machine."""
    from perennial.client.identity import Identity
    from perennial.client.site import open_site
    from perennial.config.experiment import Experiment
    from perennial.config.site import ANSWERS, SitePolicy
    from perennial.server.checkpoint import load_checkpoint
    from perennial.server.run_folder import CHECKPOINT

    if not site:
        raise ConfigError("--site: missing; a run's folder has several sites")
    checkpoint, _ = load_checkpoint(folder / CHECKPOINT)
    experiment = Experiment.model_validate(checkpoint.experiment)
    policy = SitePolicy(answers=list(ANSWERS))
    identity = Identity(site, experiment, policy, folder / "sites" / site, "cpu", 1)
    from perennial.server.opened_run import OpenedRun

    return open_site(identity), checkpoint.progress.run, OpenedRun.open(folder).current(site)


def _at_a_site(path: Path, form: Path | None, experiment: Path | None) -> "tuple[Site, str, dict[int, str]]":
    """A real site, whose data are divided as they were for the run."""
    from perennial.client.identity import Identity
    from perennial.client.site import open_site
    from perennial.client.split_key import key_of_form
    from perennial.config.experiment import load_experiment
    from perennial.config.site import load_site_config

    if form is None or experiment is None:
        raise ConfigError("--form and --experiment: missing; a site takes part in several runs")
    loaded, config = load_experiment(experiment), load_site_config(path)
    identity = Identity.of_site(config, loaded)
    run, split_key, current = key_of_form(form, identity.state_dir / "runs", loaded.digest)
    return open_site(identity, split_key=split_key), run, current
