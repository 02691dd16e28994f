"""perennial site withdraw-records: the sums of records that a site takes back."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perennial.foundation.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.client.site import Site


def withdraw_records_command(
    path: Path,
    records: Sequence[Path],
    patients: Path | None,
    form: Path | None,
    experiment: Path | None,
    site: str,
    output: Path,
) -> Iterator[str]:
    """Write the sums of the records, and say what the operator does with them.

    Raises ConfigError naming an argument that is missing or one too many.
    """
    from perennial.client.withdrawn_records import withdraw

    if bool(records) == (patients is not None):
        raise ConfigError("records: give either the records themselves or --patients")
    opened, token = _of_a_run(path, site) if path.is_dir() else _at_a_site(path, form, experiment)
    chosen = _chosen(opened, records, patients)
    by_task = withdraw(opened, token, chosen, output)
    samples = sum(part.samples for part in by_task.values())
    yield f"{output}: sums of {samples} training samples, of {len(by_task)} tasks"
    yield f"the operator gives: perennial forget RUN --site {opened.name} --group {output.name}"
    yield "remove these records from this site's data too, or the next run has them again"


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


def _of_a_run(folder: Path, site: str) -> "tuple[Site, str]":
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
    return open_site(identity), checkpoint.progress.run


def _at_a_site(path: Path, form: Path | None, experiment: Path | None) -> "tuple[Site, str]":
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
    run, split_key = key_of_form(form, identity.state_dir / "runs", loaded.digest)
    return open_site(identity, split_key=split_key), run
