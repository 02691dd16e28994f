"""Digests of a site's new data: made and charged once for each task, and sent unchanged when asked again.

A site lends digests by having `digest` among its policy's answers, and takes them back by removing it: its
next reply to the server says so.
"""

from typing import ClassVar

import torch
from torch import Tensor

from perennial.client.policy import check_digests, check_floor
from perennial.client.release import leave, pay, restore_paid
from perennial.client.site import Site
from perennial.client.training_samples import choose
from perennial.config import charges
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.foundation.streams import stream
from perennial.learning.batches import compute_outputs
from perennial.learning.site_method import Answers, PlannedRun, SiteMethod
from perennial.models.digest_networks import FeatureEncoder, hash_encoder
from perennial.privacy.config import DigestConfig
from perennial.privacy.digests import DigestGuarantee, Digests, make_digests
from perennial.privacy.noise import Noise
from perennial.privacy.released import Public, Released
from perennial.protocol.messages import DigestReply, DigestRequest
from perennial.protocol.tensors import Tensors


def answer_digest(site: Site, request: DigestRequest) -> DigestReply:
    """This task's digests. Asked again, the site sends the same ones, which costs nothing more.

    A site whose policy lends none says so. Raises PolicyRefusal when the site demands a protection that these
    do not have; DataError when it has fewer samples than one digest takes; PrivacyError when its budget does
    not cover them, or the experiment's claim would be false.
    """
    policy = site.identity.policy
    site.check_experiment(request)
    config = site.experiment.digests
    if config is None:
        raise ConfigError("digests: missing; the experiment does not say how digests are made")
    if "digest" not in policy.answers:
        return leave(
            site.identity,
            request,
            DigestReply,
            encoder=Public(request.encoder),
            samples_per_digest=Public(config.per_digest),
        )
    check_digests(policy, site.experiment, config)
    encoder = FeatureEncoder(site.data.input_shape, site.experiment.seed)
    ours = hash_encoder(encoder)
    if request.encoder != ours:
        raise ProtocolError(f"DigestRequest: encoder: found {request.encoder:.12}, this site has {ours:.12}")
    state, name = site.state(request.run), f"digest-{request.task}"
    kept = state.get(name, before=1)
    if kept is None:
        paid = pay(site.identity, _release_digests(site, request, encoder, config))
        state.put(name, 0, paid.value, {"samples_per_digest": config.per_digest})
    else:
        paid = restore_paid(Tensors(kept[0]))
    return leave(
        site.identity,
        request,
        DigestReply,
        encoder=Public(ours),
        samples_per_digest=Public(config.per_digest),
        digests=paid,
    )


def compute_digests(
    site: Site, encoder: FeatureEncoder, task: int, source: Noise
) -> tuple[Digests, DigestGuarantee]:
    """Digests of the site's training samples of one task's classes; nothing is recorded."""
    config = site.experiment.digests
    assert config is not None
    classes = site.process.registry.schedule.list_classes(task)
    indices = site.data.find_task_indices("train", classes.start, classes.stop)
    check_floor(site.identity.policy, "digest", len(indices))
    features, labels = encode(site, encoder, indices), site.data.y[indices]
    generator = stream(site.experiment.seed, "digest-groups", site.name, task)
    return make_digests(features, labels, classes, config, generator, source)


@torch.no_grad()
def encode(site: Site, encoder: FeatureEncoder, indices: Tensor) -> Tensor:
    """(n, ...) features, on the CPU, of the samples at indices (n,) after the site's normalisation."""
    config = site.experiment.digests
    data = site.samples(indices, hidden=config is not None and config.protects)
    encoder = encoder.to(site.models.device)
    return compute_outputs(lambda inputs: encoder(inputs).cpu(), data) if len(data) else torch.empty(0, 1)


class SummarySite(SiteMethod):
    """The site half: lends feature summaries, and tells the server when it lends none any more."""

    answers: ClassVar[Answers] = {DigestRequest: answer_digest}

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        return int(kind == "digest" and plan.experiment.digests is not None)


def _release_digests(
    site: Site, request: DigestRequest, encoder: FeatureEncoder, config: DigestConfig
) -> Released[Tensors]:
    experiment, classes = site.experiment, site.find_task_range(request)
    clear = charges.price_clear_release(experiment, request.run, "digest")
    mechanisms = charges.price_digests(experiment, request.run, config)
    # groups of samples are mixed, so that none can be left out by itself
    choose(site, clear, lambda: site.data.find_task_indices("train", classes.start, classes.stop), mechanisms)
    digests, guarantee = compute_digests(site, encoder, request.task, Noise())
    if not config.protects:
        mechanisms = charges.price_digests(experiment, request.run, config, guarantee)
    if experiment.privacy.enabled and config.labels_in_the_clear:
        mechanisms.append(clear)
    tensors = Tensors(features=digests.features.cpu(), labels=digests.labels.cpu())
    return Released(tensors, *mechanisms)
