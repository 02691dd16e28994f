"""What happens to an update before it leaves the site: protection first, then the charge to the site's
ledger."""

from torch import Tensor

from client.site import Site
from foundation.errors import PrivacyError
from foundation.streams import stream
from privacy.entries import Entry
from privacy.ledger import Ledger, Limit
from privacy.noise import NoiseSource, SecureNoise, SeededNoise
from privacy.protection import protect_update
from protocol.messages import TrainRequest

RECIPIENT = "server"


def release_update(site: Site, request: TrainRequest, update: Tensor) -> None:
    """Protect update (P,) in place as the experiment says, and charge the ledger; when this returns, it may
    leave.

    A simulated site without protection keeps no ledger: nothing leaves anybody. Raises PrivacyError when the
    site's lifetime budget does not cover the release, StateError when the ledger cannot be written.
    """
    privacy, identity = site.experiment.privacy, site.identity
    if privacy.mode == "none" and not identity.deployed:
        return
    entry = Entry.of_update(privacy, run=request.run, experiment=request.experiment, recipient=RECIPIENT)
    policy = identity.policy
    limit = (
        None if policy.max_epsilon is None else Limit(policy.max_epsilon, policy.delta, privacy.accountant)
    )
    if privacy.mode == "client_local":
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        protect_update(update, privacy.clip_norm, privacy.noise_multiplier, _noise(site, request))
    elif privacy.mode != "none":
        raise PrivacyError(
            f"privacy.mode: {privacy.mode!r} is not offered by this learner; offered: none, client_local"
        )
    Ledger(identity.state_dir).charge(entry, limit)


def _noise(site: Site, request: TrainRequest) -> NoiseSource:
    if site.experiment.privacy.noise_source == "secure":
        return SecureNoise()
    return SeededNoise(stream(site.experiment.seed, "dp-noise", site.name, request.round))
