"""The first check of a deployed site: is this request one that the approved experiment makes?

The policy must also bear its size. What the request would release is judged afterwards, by client/policy.py
and client/floor.py, where it is computed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from perennial.client.identity import Identity
from perennial.client.plan import Plan
from perennial.client.policy import check_secure
from perennial.client.quota import Quota
from perennial.client.request_count import RequestCount
from perennial.client.site import registry_of_site, require_same_experiment, require_split_key
from perennial.client.split_key import keep_split_key
from perennial.client.time_limit import TIME_RULE, time_limit
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.foundation.errors import (
    DataError,
    PerennialError,
    PolicyRefusal,
    PrivacyError,
    StateError,
)
from perennial.learning.private_training import steps_of_round
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp


@contextmanager
def admitted(identity: Identity, request: Stamp) -> Iterator[None]:
    """Check and count a request of a deployed site; inside the block it is answered.

    Every request about a run passes here, whether it carries values or opens a masked sum. A simulated site
    admits everything. Raises ProtocolError for another experiment, PolicyRefusal naming the rule, StateError
    when the request cannot be counted.
    """
    if not identity.deployed:
        yield
        return
    policy, experiment = identity.policy, identity.experiment
    require_split_key(identity, request)
    registry = registry_of_site(identity)
    require_same_experiment(experiment, registry, request)
    plan = Plan(experiment, registry)
    check_bounds(policy, experiment, plan.rounds)
    kind = plan.check(request)
    if isinstance(request, TrainRequest):
        check_clip_norm(policy, experiment, request.clip_norm)
    folder = identity.state_dir / "runs" / request.run
    if identity.limits is not None:
        Quota(folder.parent, identity.limits).require(folder, 0)
    count = RequestCount(identity.state_dir)
    count.take(policy, plan, kind, request)
    if identity.own_data is not None:
        keep_split_key(folder, request.split_key)
    try:
        with time_limit(policy.max_seconds):
            yield
    except PerennialError as error:
        if _told_nothing(request, error):
            count.give_back(plan, kind, request)
        raise


def _told_nothing(request: Stamp, error: PerennialError) -> bool:
    """Whether a request failed for a reason that is not in its model: a disk, data, policy or budget.

    The server asks for the same round until it is served, and must not find the door shut once the hospital
    has mended what was wrong.
    """
    if isinstance(error, StateError | DataError):
        return True
    of_the_site = isinstance(request, TrainRequest) and isinstance(error, PolicyRefusal | PrivacyError)
    return of_the_site and not str(error).startswith(TIME_RULE)


@dataclass(frozen=True)
class Bound:
    """One setting of an experiment and the policy's limit on it.

    rule: key of the policy. key: of the experiment. least: `allowed` is a minimum for `found`, not a maximum.
    """

    rule: str
    key: str
    found: float
    allowed: float
    least: bool = False

    @property
    def holds(self) -> bool:
        return self.found >= self.allowed if self.least else self.found <= self.allowed

    def __str__(self) -> str:
        words = "at least" if self.least else "at most"
        return f"policy.{self.rule}: {self.key}: found {self.found:g}, allowed {words} {self.allowed:g}"


def bounds(policy: SitePolicy, experiment: Experiment, rounds: int) -> Iterator[Bound]:
    """Yield every limit of the policy that applies to the experiment, with the experiment's own value.

    rounds: of the whole run. Clip norm and noise multiplier are limited in mode client_central alone, where
    the site has to trust the server with its update; in other modes the site adds noise, and the ledger
    counts its cost.
    """
    learner, privacy = experiment.learner, experiment.privacy
    yield Bound("max_rounds", "rounds of all tasks", rounds, policy.max_rounds)
    yield Bound("max_epochs", "learner.epochs", learner.epochs, policy.max_epochs)
    if privacy.mode == "sample" and privacy.release == "updates":
        steps = steps_of_round(learner, privacy)
        yield Bound("max_steps", "steps of a round", steps, policy.max_steps)
    if privacy.mode == "client_central":
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        yield Bound("max_clip_norm", "privacy.clip_norm", privacy.clip_norm, policy.max_clip_norm)
        yield Bound(
            "min_noise_multiplier",
            "privacy.noise_multiplier",
            privacy.noise_multiplier,
            policy.min_noise_multiplier,
            least=True,
        )


def check_bounds(policy: SitePolicy, experiment: Experiment, rounds: int) -> None:
    """Raises PolicyRefusal naming the first limit that an experiment breaks. rounds: of the whole run."""
    for bound in bounds(policy, experiment, rounds):
        if not bound.holds:
            raise PolicyRefusal(str(bound))


def unmet(policy: SitePolicy, plan: Plan) -> Iterator[str]:
    """Yield, in words, each demand of the policy that the experiment as a whole does not meet."""
    try:
        check_secure(policy, plan.experiment, plan.experiment.data.sites)
    except PolicyRefusal as refusal:
        yield str(refusal)
    yield from (str(bound) for bound in bounds(policy, plan.experiment, plan.rounds) if not bound.holds)
    if policy.max_evaluations is not None and plan.questions() > policy.max_evaluations:
        yield (
            f"policy.max_evaluations: the experiment asks how many answers of {plan.questions()} models are "
            f"right, allowed {policy.max_evaluations}"
        )


def check_clip_norm(policy: SitePolicy, experiment: Experiment, clip_norm: float | None) -> None:
    """Raises PolicyRefusal if a request's clip norm, in mode client_central, is above the policy's."""
    bound = Bound("max_clip_norm", "clip_norm of the request", clip_norm or 0.0, policy.max_clip_norm)
    if experiment.privacy.mode == "client_central" and not bound.holds:
        raise PolicyRefusal(str(bound))


def check_steps(policy: SitePolicy, experiment: Experiment, samples: int) -> None:
    """Refuse training that would take more steps than the policy allows.

    Raises PolicyRefusal, which does not say how many samples the site has.
    """
    steps = experiment.learner.epochs * math.ceil(samples / experiment.learner.batch_size)
    if experiment.privacy.mode != "sample" and steps > policy.max_steps:
        raise PolicyRefusal(
            f"policy.max_steps: a round of {experiment.learner.epochs} epochs with batches of "
            f"{experiment.learner.batch_size} takes more than {policy.max_steps} steps here"
        )
