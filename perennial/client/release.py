"""What happens to an update before it leaves the site: protection first, then the charge to the ledger."""

import json
from dataclasses import dataclass

from torch import Tensor

from perennial.client.record_sets import Chosen, book_of
from perennial.client.site import Site
from perennial.config import charges
from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.learning.training import TrainingResult
from perennial.privacy.clipping import clip
from perennial.privacy.discrete_gaussian import SecureWords, SeededWords, WordSource
from perennial.privacy.entries import Entry
from perennial.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from perennial.privacy.protection import protect_update
from perennial.protocol.messages import TrainReply, TrainRequest

POLICY_METRICS = frozenset({"digests"})
"""What a reply tells of the site's policy, and not of its data."""


@dataclass(frozen=True)
class ReleasedFields:
    """Fields of a reply that may leave beside the update. within_clip_norm: for adaptive clipping alone."""

    num_examples: int
    train_loss: float | None
    steps: int
    within_clip_norm: bool | None = None


def release_update(
    site: Site, request: TrainRequest, result: TrainingResult, samples: int, chosen: Chosen | None = None
) -> ReleasedFields:
    """Protect the update (P,) in place as the experiment says, and charge the ledger.

    chosen: the records that it was trained on; None: every record pays.

    When this returns, the update and the returned fields may leave. A simulated site without protection keeps
    no ledger, because nobody's data leaves.
    Raises PrivacyError when the site's lifetime budget does not cover the release, StateError when the ledger
    cannot be written.
    """
    privacy = site.experiment.privacy
    fields = _fields_of(site, result, samples)
    if privacy.mode == "client_local":
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        source = noise_source(site, "dp-noise", request.round)
        protect_update(result.update, privacy.clip_norm, privacy.noise_multiplier, source)
    elif privacy.mode in ("client_central", "client_shared"):
        # under client_shared the site's share of the noise comes on the grid (client/secure_values.py)
        fields = ReleasedFields(
            fields.num_examples, fields.train_loss, fields.steps, _clip(site, request, result.update)
        )
    charge(site, request.run, of_update=True, chosen=chosen)
    return fields


def charge(site: Site, run: str, *, of_update: bool, chosen: Chosen | None = None) -> None:
    """Record a release in the site's ledger before it leaves.

    A release is an update, with what the experiment lets leave in the clear beside it, or else the counts of
    an evaluation. chosen and errors: as charge_entry().
    """
    privacy = site.experiment.privacy
    if of_update:
        if privacy.enabled and privacy.allow_unaccounted_metrics:
            charge_entry(site, charges.in_the_clear(site.experiment, run, "metrics"))
        charge_entry(site, charges.update(site.experiment, run), chosen)
    else:
        charge_entry(site, charges.evaluation(site.experiment, run), chosen)


def charge_entry(site: Site, entry: Entry, chosen: Chosen | None = None) -> None:
    """Record one release against the site's lifetime budget, before it leaves.

    A simulated site without protection keeps no ledger, because nobody's data leaves. chosen: the records
    that it was computed from; None: every record pays. Raises PrivacyError when the budget does not cover it,
    StateError when it cannot be recorded.
    """
    open_to_all = entry.mechanism == "unprotected" and not site.experiment.privacy.enabled
    if open_to_all and not site.identity.deployed:
        return
    limit, ledger = site.identity.policy.limit, site.identity.ledger
    if chosen is None or chosen.ids is None:
        ledger.charge(entry, limit)
    else:
        book_of(site).charge(ledger, entry, limit, chosen.ids, chosen.version)


def check_reply(site: Site, reply: TrainReply) -> TrainReply:
    """The reply, unless it carries data-dependent values that no accountant covers.

    Tensors never may; numbers may if the experiment allows them.
    Raises PrivacyError naming them; a strategy that asks for them does not go with this privacy mode.
    """
    privacy = site.experiment.privacy
    if not privacy.enabled:
        return reply
    metrics = () if privacy.allow_unaccounted_metrics else json.loads(reply.metrics)
    beside = [*(reply.method or {}), *(f"metrics.{name}" for name in metrics if name not in POLICY_METRICS)]
    if beside:
        raise PrivacyError(
            f"privacy.mode {privacy.mode}: the reply would carry {', '.join(beside[:3])} beside the "
            "protected update, which no accountant covers; choose a strategy that exchanges updates only"
        )
    return reply


def noise_source(site: Site, purpose: str, *place: str | int, kind: str = "") -> NoiseSource:
    """The source of Gaussian noise for this site: the operating system's, or one that the seed repeats.

    kind: secure or seeded; '': privacy.noise_source of the experiment. purpose, place: name the stream of a
    seeded one.
    """
    if (kind or site.experiment.privacy.noise_source) == "secure":
        return SecureNoise()
    return SeededNoise(stream(site.experiment.seed, purpose, site.name, *place))


def word_source(site: Site, purpose: str, *place: str | int, kind: str = "") -> WordSource:
    """The source of words for discrete noise; arguments as in noise_source()."""
    if (kind or site.experiment.privacy.noise_source) == "secure":
        return SecureWords()
    return SeededWords(stream(site.experiment.seed, purpose, site.name, *place))


def _fields_of(site: Site, result: TrainingResult, samples: int) -> ReleasedFields:
    privacy = site.experiment.privacy
    if not privacy.enabled or privacy.allow_unaccounted_metrics:
        return ReleasedFields(samples, result.loss, result.steps)
    # steps follow the number of samples, except in mode sample, where they are public
    return ReleasedFields(1, None, result.steps if privacy.mode == "sample" else 0)


def _clip(site: Site, request: TrainRequest, update: Tensor) -> bool | None:
    privacy = site.experiment.privacy
    adaptive = privacy.adaptive_clipping is not None
    if adaptive != (request.clip_norm is not None):
        raise PrivacyError(
            f"clip_norm: found {request.clip_norm} in the request; allowed: a number exactly when the "
            "experiment has privacy.adaptive_clipping"
        )
    bound = request.clip_norm or privacy.clip_norm
    assert bound is not None
    within = clip(update, bound) <= bound
    return within if adaptive else None
