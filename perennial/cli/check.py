"""perennial check."""

import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.presets import describe_learner
from perennial.config.secure import SecureConfig
from perennial.config.site import Answer, SiteConfig, SitePolicy, load_site_config
from perennial.config.strategies import HEADS_OF_A_MAP, MOST_CANDIDATES
from perennial.config.yaml_file import read_yaml
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, PolicyRefusal, PrivacyError
from perennial.models.feature_maps.config import choose_image_size, name_choices

if TYPE_CHECKING:
    from perennial.data.config import DataConfig
    from perennial.server.preflight import Checked

GIBIBYTE = 2**30
SITE_ONLY = SiteConfig.model_fields.keys() - Experiment.model_fields.keys()
"""Keys by which a file is a site's, even where it lacks others."""


def check_command(
    path: Path, experiment: Path | None, gigabytes: float = 8.0, overrides: Sequence[str] = ()
) -> None:
    """Validate path and what it points at; print what would happen.

    gigabytes: the most memory that the check may take, because a stranger's file may ask for any amount.
    overrides: KEY=VALUE of an experiment.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with _limit_memory(path, gigabytes):
        content = read_yaml(path)
        if "tasks" not in content and (path.stem == "site" or content.keys() & SITE_ONLY):
            if overrides:
                raise ConfigError(
                    f"--set: found with {path}, which is a site's file; allowed for an experiment"
                )
            site = load_site_config(path)
            with plugins.use_only(site.plugins):
                _check_site(console, site, load_experiment(experiment) if experiment else None)
        else:
            _check_experiment(console, load_experiment(path, [*overrides]))


@contextmanager
def _limit_memory(path: Path, gigabytes: float) -> Iterator[None]:
    """Raises ConfigError where the block needs more memory than this; only the block is bounded."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(gigabytes * GIBIBYTE)
    hard = before[1] if before[1] != resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_DATA, (min(most, hard), before[1]))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"{path}: what it describes needs more than {gigabytes:g} GiB of memory to check; allow more "
            "with --memory, if you trust the file"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _check_experiment(console: Console, experiment: Experiment) -> None:
    import torch

    from perennial.server.preflight import run_preflight

    checked = run_preflight(experiment, torch.device("cpu"))
    facts, schedule = checked.facts, checked.facts.registry.schedule
    console.print(
        f"{experiment.name}: {facts.sites} sites, inputs {facts.inputs.shape}, "
        f"{checked.parameters} trained parameters"
    )
    for task in range(1, schedule.count + 1):
        names = ", ".join(facts.registry.classes[label] for label in schedule.list_classes(task))
        rounds = experiment.lead_rounds(task) + schedule.rounds[task - 1]
        console.print(f"  task {task}: {names} ({rounds} rounds)")
    from perennial.strategies.analytic.method import Analytic

    closed_form = checked.strategy.find(Analytic)
    if experiment.secure is not None:
        closed_form = None
        console.print(
            f"  {_describe_sums(experiment.secure, facts.sites, shared_noise=experiment.privacy.shared)}"
        )
    kept = 0
    if closed_form is not None:
        kept = closed_form.count_kept_bytes(checked.width, schedule, experiment.privacy)
    if kept:
        console.print(
            f"  keep_sites: sums of {kept / 1e6:,.1f} MB a site stay on the server's disk, "
            f"{kept * facts.sites / 1e9:,.2f} GB for {facts.sites} sites at most, until the run's folder goes"
        )
    if experiment.strategy.parameters.get("head") == "auto":
        console.print(*_describe_choices(experiment, checked), sep="\n")
    if experiment.strategy.trains:
        written = experiment.learner.model_dump(mode="json", exclude_defaults=True)
        lines = yaml.safe_dump(written, sort_keys=False, default_flow_style=None).splitlines()
        console.print(f"{describe_learner(experiment)}; written out:")
        console.print("  preset: none", *lines, sep="\n  ")
    for note in [*facts.notes, *_describe_enlarged(experiment)]:
        console.print(f"  note: {note}")
    if not experiment.data.only_at_sites:
        from perennial.cli.data_tables import describe_data, print_data
        from perennial.config.simulation import load_simulated_federation
        from perennial.data.suspicion import find_suspicions

        federation, classes = load_simulated_federation(experiment), facts.registry.classes
        print_data(console, describe_data(federation.sites, classes))
        for question in find_suspicions(experiment.data, federation.sites, classes, federation.test):
            console.print(f"  question: {question}")
        _print_ranks(console, experiment.data, federation.columns)
    console.print("ok")


MOST_RANKED = 20


def _print_ranks(console: Console, data: "DataConfig", columns: Mapping[str, Any] | None) -> None:
    """Print how well each column of a table alone tells the class, so that a person sees what leaks."""
    if data.source != "csv" or data.path is None or columns is None or len(columns) < 2:
        return
    from perennial.data.leaks import rank_columns
    from perennial.data.table import read_table

    ranked = rank_columns(read_table(data), data.label_column, columns, data.missing)
    console.print("columns by how well each alone tells the class (AUROC; .5 tells nothing):")
    for told in ranked[:MOST_RANKED]:
        console.print(f"  {told}")
    if len(ranked) > MOST_RANKED:
        console.print(f"  and {len(ranked) - MOST_RANKED} more, of {ranked[MOST_RANKED].auroc:.3f} or less")


def _describe_enlarged(experiment: Experiment) -> Iterator[str]:
    """What a map of images enlarges again after it was read."""
    data, wanted = experiment.data, choose_image_size(experiment.model.maps)
    size = data.size if data.source == "folder" else None
    if size and wanted and (size[0] < wanted[0] or size[1] < wanted[1]):
        yield (
            f"data.image_size: files become {size[0]} x {size[1]} pixels, and a map enlarges them "
            f"to {wanted[0]} x {wanted[1]}; leave it out, and they are read at the map's size"
        )


def _describe_choices(experiment: Experiment, checked: "Checked") -> Iterator[str]:
    """What it costs in messages and minutes that validation samples choose, and among which maps."""
    from perennial.learning.analytic.statistics import SumsForm

    def of(widths: Sequence[int], heads: int) -> tuple[float, int]:
        """(megabytes of heads, minutes) of heads over maps of so many features."""
        values = sum(heads * classes * (width + 1) for width in widths)
        return 8e-6 * values, max(1, round(sum(heads * (width / 3000) ** 3 * 2 / 60 for width in widths)))

    schedule, classes = checked.facts.registry.schedule, len(checked.facts.registry.classes)
    if alone := checked.alternatives:
        sums = 1e-6 * sum(SumsForm(width + 1).bytes(schedule.num_classes(1)) for width in alone)
        heads, minutes = of(alone, HEADS_OF_A_MAP)
        for choice in experiment.model.choices:
            names = ", ".join(name_choices(choice))
            yield f"  one of these maps is chosen in task 1, for the whole run: {names}"
        yield (
            f"  to choose, {len(alone)} more messages of sums from each site, {sums:,.1f} MB together, and "
            f"{len(alone)} of heads to it, {heads:,.1f} MB together; about {minutes} min at the server"
        )
    heads, minutes = of([checked.width], MOST_CANDIDATES)
    yield (
        f"  head auto: one more message of at most {heads:,.1f} MB to each site in each task, with at most "
        f"{MOST_CANDIDATES} heads to compare, and about {minutes} min at the server to solve them"
    )


def _describe_sums(secure: SecureConfig, sites: int, *, shared_noise: bool) -> str:
    """What the server sees of a run under `secure`."""
    if not secure.masks:
        return "secure: masks false, so the server sees each site's integers; for comparisons only"
    needed = secure.parameters(shared_noise=shared_noise).count_survivors_needed(sites)
    return (
        f"secure: the server sees sums of at least {needed} of {sites} sites, unless more than "
        f"{secure.assumed_colluders} of them work with it"
    )


def _check_site(console: Console, site: SiteConfig, experiment: Experiment | None) -> None:
    from perennial.learning.device import choose_device

    device = choose_device(site.device)
    folder = site.state_dir
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"state_dir: {site.state_dir} cannot be written; allowed: a folder that this user owns"
        )
    policy = site.policy
    budget = (
        "no lifetime budget" if policy.max_epsilon is None else f"lifetime epsilon {policy.max_epsilon:g}"
    )
    console.print(f"site {site.site} on {device}: answers {', '.join(policy.answers)}; {budget}")
    refusals = [] if experiment is None else [*_list_refusals(policy, experiment)]
    for _, refusal in refusals:
        console.print(f"  {refusal}")
    if experiment is None:
        console.print("data not read: give --experiment to read it as that experiment would")
    elif site.data is None:
        from perennial.client.identity import require_data

        require_data(site, experiment)
        console.print("data not read: this site has a share of the experiment's")
    else:
        from perennial.cli.data_tables import describe_data, print_data
        from perennial.data.deployed import load_site, merge_site_config
        from perennial.data.splits import derive_simulation_key
        from perennial.data.suspicion import find_suspicions
        from perennial.server.continuation import plan_registry

        registry = plan_registry(experiment)
        config = merge_site_config(experiment.data, site.data)
        # the key of a run is drawn when it starts; its parts will be about as large as these
        key = derive_simulation_key(experiment.seed)
        protected = site.policy.require_privacy != "none" or experiment.privacy.enabled
        data = load_site(config, registry.classes, site.site, experiment.seed, key, protected=protected)
        print_data(console, describe_data({site.site: data}, registry.classes))
        for note in data.notes:
            console.print(f"  note: {note}")
        for question in find_suspicions(config, {site.site: data}, registry.classes):
            console.print(f"  question: {question}")
    if experiment is not None and any(whole for whole, _ in refusals):
        raise PolicyRefusal(
            f"site {site.site} would take no part in experiment {experiment.name}, for the reasons above"
        )
    console.print("ok")


def _list_refusals(policy: SitePolicy, experiment: Experiment) -> Iterator[tuple[bool, str]]:
    """What the experiment asks of every site and this one would refuse, by its settings alone.

    With each whether the site then takes no part.
    """
    from perennial.client.door import describe_unmet_demands
    from perennial.client.plan import Plan
    from perennial.client.policy import (
        check_answer,
        check_digests,
        check_evaluation,
        check_statistics,
        check_update,
    )
    from perennial.server.continuation import plan_registry

    for words in describe_unmet_demands(policy, Plan(experiment, plan_registry(experiment))):
        yield True, f"would refuse the experiment: {words}"
    asked: dict[Answer, Callable[[], None]] = {}
    if experiment.strategy.trains:
        asked["train"] = lambda: check_update(policy, experiment)
    else:
        asked["statistics"] = lambda: check_statistics(policy, experiment)
    if experiment.evaluation.federated:
        asked["evaluate"] = lambda: check_evaluation(policy, experiment)
    digests = experiment.digests
    if digests is not None:
        asked["digest"] = lambda: check_digests(policy, experiment, digests)
    for kind, check in asked.items():
        try:
            check_answer(policy, kind)
            check()
        except (PolicyRefusal, PrivacyError) as error:
            taking_part = "train" if experiment.strategy.trains else "statistics"
            yield kind == taking_part, f"would refuse to answer {kind!r}: {error}"
