"""Secure aggregation: `secure:` of an experiment, and what it cannot be combined with."""

from typing import Any

from pydantic import Field

from perennial.config.strategies import ASKS
from perennial.foundation.plain import Block
from perennial.privacy.secure.roster import MOST_SITES, Parameters


class SecureConfig(Block):
    """The server learns sums over sites, and no site's own values; see docs/secure_aggregation.md.

    masks: false sends the same integers without masks, to compare a run with. least: sites in a sum.
    assumed_colluders: sites that may collude with the server without learning more. quorum: survivors without
    which nothing is opened; null: as many as the shares need.
    """

    masks: bool = True
    least: int = Field(default=3, ge=2)
    assumed_colluders: int = Field(default=0, ge=0)
    quorum: int | None = Field(default=None, ge=2)

    @property
    def honest(self) -> int:
        """Honest survivors that every opened sum has, m, by which shared noise is sized."""
        return (self.quorum or 0) - self.assumed_colluders

    def parameters(self, *, shared_noise: bool) -> Parameters:
        """Parameters of the protocol. shared_noise: whether the sites share noise, so that m matters."""
        honest = self.honest if shared_noise else 0
        return Parameters(self.assumed_colluders, self.least, self.quorum or 0, honest)


def refuse_what_needs_single_updates(experiment: Any) -> None:
    """Raises ValueError naming the setting that cannot work when the server sees sums alone.

    experiment: an Experiment with `secure`.
    """
    name, asks = experiment.strategy.name, experiment.strategy.asks
    if asks.single_updates:
        allowed = ", ".join(name for name, asks in ASKS.items() if not asks.single_updates)
        raise ValueError(
            f"secure: not with strategy {name!r}, because {asks.single_updates}; allowed: {allowed}"
        )
    if asks.statistics and experiment.strategy.parameters.get("head") == "balanced_ridge":
        raise ValueError(
            "secure: not with strategy.head 'balanced_ridge', because it asks a site for its sums again when "
            "the others' counts change, and a site's sums go into one opened sum; allowed: gaussian, ridge"
        )
    if experiment.digests is not None:
        raise ValueError("secure: not with digests, which single sites lend in the clear; remove one of them")
    if experiment.pretraining is not None:
        raise ValueError(
            "secure: not with pretraining, whose averaging sees single updates; remove one of them"
        )
    privacy = experiment.privacy
    if privacy.bayesian:
        raise ValueError("secure: not with privacy.bayesian, which reads single replies")
    secure: SecureConfig = experiment.secure
    sites = experiment.data.sites
    if sites is not None:
        if sites > MOST_SITES:
            raise ValueError(f"secure: data.sites is {sites}, allowed {MOST_SITES} in a masked sum")
        needed = secure.parameters(shared_noise=privacy.shared).count_survivors_needed(sites)
        if sites < needed:
            raise ValueError(
                f"secure: data.sites is {sites}, and a sum needs {needed} with assumed_colluders "
                f"{secure.assumed_colluders}, least {secure.least} and quorum {secure.quorum}"
            )


def require_shared_noise(experiment: Any) -> None:
    """Raises ValueError when the sites of an experiment cannot share noise.

    They need masked sums, a quorum of at least assumed_colluders + 2, and rounds.fraction 1. experiment: an
    Experiment.
    """
    secure: SecureConfig | None = experiment.secure
    mode = experiment.privacy.mode
    if secure is None or secure.quorum is None or secure.honest < 2:
        raise ValueError(
            f"privacy.mode {mode}: needs `secure` with a quorum of at least assumed_colluders + 2, for the "
            "noise of one site hides nothing by itself"
        )
    if not secure.masks:
        raise ValueError(
            f"secure.masks: found false with privacy.mode {mode}, allowed true: each site's values would "
            "leave under a share of the noise alone"
        )
    if experiment.rounds.fraction != 1.0:
        raise ValueError(f"rounds.fraction: mode {mode} asks every site in every round; allowed 1.0")
