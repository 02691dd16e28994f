"""Finds out which site this process answers for, from its configuration and without reading any data."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context

from perennial.config.approval import find_approved_experiment
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.site import ANSWERS, SiteConfig, SitePolicy, StateLimits, load_site_config
from perennial.data.config import DataConfig
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, PolicyRefusal, clean_text

if TYPE_CHECKING:
    from perennial.config.simulation import DataKey
    from perennial.privacy.ledger import Ledger


@dataclass(frozen=True)
class Identity:
    """A site's name, data and machine.

    own_data: a deployed site's data block; None for a share of the experiment's data.
    shared_models: folder that simulated sites share for the models of earlier tasks; None for a folder in the
    site's own state.
    ledger_tip, limits, plugins: as site.yaml says; a simulated site has none of them.
    """

    name: str
    experiment: Experiment
    policy: SitePolicy
    state_dir: Path
    device: str
    threads: int
    own_data: DataConfig | None = None
    shared_models: Path | None = None
    deployed: bool = False
    ledger_tip: Path | None = None
    limits: StateLimits | None = None
    gpu: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_site(cls, config: SiteConfig, experiment: Experiment) -> "Identity":
        """The identity of a deployed site, from its site.yaml. Raises PolicyRefusal if it has no data."""
        require_data(config, experiment)
        return cls(
            config.site,
            experiment,
            config.policy,
            config.state_dir,
            config.device,
            config.threads,
            own_data=config.data,
            deployed=True,
            ledger_tip=config.ledger_tip,
            limits=config.state,
            gpu=",".join(config.gpu),
            plugins=config.plugins,
        )

    @property
    def ledger(self) -> "Ledger":
        """This site's ledger, with the file elsewhere that witnesses it.

        Raises StateError when another site's ledger counts what leaves of these data.
        """
        from perennial.privacy.ledger import Ledger

        own = self.own_data
        data = None if own is None or own.path is None else Path(own.path)
        return Ledger(self.state_dir, self.ledger_tip, data)


@contextmanager
def use_plugins(identity: Identity, context: Context) -> Iterator[None]:
    """Context manager: the plug-ins that a site answers with are in use.

    A deployed site's are those of its site.yaml. A simulated one has those of the program, and of the run
    config that the same person wrote.
    """
    named = plugins.parse_names(str(context.run_config.get("plugins", "")))
    with plugins.use_only(identity.plugins) if identity.deployed else plugins.use_also(named):
        yield


def require_data(config: SiteConfig, experiment: Experiment) -> None:
    """Raises PolicyRefusal when a site has neither data of its own nor a share of the experiment's data."""
    data, shares = experiment.data, experiment.data.shares
    if config.data is not None or (not data.only_at_sites and (shares is None or config.site in shares)):
        return
    found = "has none" if shares is None else f"divides its data among {clean_text(', '.join(shares), 100)}"
    raise PolicyRefusal(
        f"data: site.yaml of {config.site} has no `data`, and experiment {experiment.name} {found}; write "
        "under `data` where this site's samples are"
    )


def _load_experiment(settings: RunSettings) -> Experiment:
    # a run that goes on a second time in one process has another experiment in the same file
    try:
        changed = os.stat(settings.path).st_mtime_ns
    except OSError:
        changed = 0
    return _read_experiment(settings, changed)


@lru_cache(maxsize=4)
def _read_experiment(settings: RunSettings, changed: int) -> Experiment:
    return settings.load()


@dataclass
class _Simulated:
    """The sites of the latest experiment and its data, each made once, because each message asks for it."""

    experiment: Experiment
    data: "DataKey"
    names: tuple[str, ...]
    settings: RunSettings | None = None
    """Of the site that was identified last."""
    identities: dict[tuple[RunSettings | None, object], Identity] = field(default_factory=dict)


_latest: list[_Simulated] = []


def _find_simulated(experiment: Experiment) -> _Simulated:
    # imported here: a deployed site never reads simulated data
    from perennial.config.simulation import build_data_key, list_simulated_sites

    data = build_data_key(experiment)
    if not _latest or _latest[0].data != data or _latest[0].experiment != experiment:
        _latest[:] = [_Simulated(experiment, data, list_simulated_sites(experiment))]
    return _latest[0]


@lru_cache(maxsize=4)
def _read_site_config(path: Path, changed: int) -> SiteConfig:
    return load_site_config(path)


def identify(context: Context, beside: Context | None = None) -> Identity:
    """The identity of the site that runs on this node.

    beside: context of a simulated site that was identified just before in the same run; its files are not
    read again.
    Raises ConfigError when the node's configuration names neither a site.yaml nor a partition, PolicyRefusal
    when a site with a site.yaml did not approve the run's code and settings.
    """
    site_file = context.node_config.get("site")
    partition = context.node_config.get("partition-id")
    if beside is not None and site_file is None and _latest and beside.run_config == context.run_config:
        # neither the settings nor the file are read again
        known = _latest[0].identities.get((_latest[0].settings, partition))
        if known is not None:
            return known
    settings = RunSettings.from_run_config(context.run_config)
    if site_file is not None:
        path = Path(str(site_file))
        config = _read_site_config(path, path.stat().st_mtime_ns if path.exists() else 0)
        with plugins.use_only(config.plugins):
            experiment = find_approved_experiment(settings, config.approvals, config.plugins)
        return Identity.of_site(config, experiment)
    experiment = _load_experiment(settings)
    if not isinstance(partition, int):
        raise ConfigError(
            'node config: needs site="/path/to/site.yaml" (a real site) or partition-id=K (a simulated one); '
            f"found {sorted(context.node_config) or 'nothing'}"
        )
    sites = _find_simulated(experiment)
    sites.settings = settings
    known = sites.identities.get((settings, partition))
    if known is not None:
        return known
    names = sites.names
    if not 0 <= partition < len(names):
        raise PolicyRefusal(
            f"partition-id {partition}: the experiment has {len(names)} sites; this node takes no part"
        )
    run_folder = settings.folder(experiment)
    identity = sites.identities[settings, partition] = Identity(
        names[partition],
        experiment,
        SitePolicy(answers=list(ANSWERS)),
        run_folder / "sites" / names[partition],
        settings.device,
        settings.threads,
        shared_models=run_folder / "sites" / "models",
        gpu=settings.gpu,
    )
    return identity
