"""What an app asks of a hospital, in words, before the hospital approves it.

That is: what changes against the last approval, first what changes what leaves the site; data, protection,
cost, what leaves and how often.
"""

import math
from collections import Counter
from collections.abc import Iterator

from perennial.client.door import describe_unmet_demands
from perennial.client.identity import require_data
from perennial.client.plan import Plan
from perennial.config import charges
from perennial.config.approval import Approval
from perennial.config.document import flatten_settings
from perennial.config.experiment import Experiment
from perennial.config.site import SiteConfig, SitePolicy
from perennial.data.config import DataConfig
from perennial.data.schedule import Registry, build_registry
from perennial.deploy.application import Offer
from perennial.foundation.errors import ConfigError, PolicyRefusal, clean_text
from perennial.foundation.plugins import use_only
from perennial.models.feature_maps.config import map_in_words
from perennial.privacy.composition import compose
from perennial.privacy.digests import compute_guarantee
from perennial.privacy.entries import Entry
from perennial.privacy.statement import UNIT
from perennial.server.continuation import plan_registry

WORDS = {
    "train": "updates of the model, computed from the training samples of the task and the exemplars kept",
    "finish_task": "at the end of a task: that it is over; exemplars are chosen and stay",
    "evaluate": "counts of right answers on held-out samples, by class; where policy.answers lists measures, "
    "tables of how they were called and with which probability",
    "personal_model": "that the site's own model is kept; counts of its right answers where sites evaluate",
    "sparsity": "how often each channel of a network is silent, as a mean over the training samples",
    "statistics": "sums of fixed features of the training samples, and of products of every two features",
    "class_counts": "the number of training samples of each class",
    "compare_heads": "counts of right answers of several classifiers on validation samples, by class",
    "digest": "mixtures of features of a few samples each, which the server keeps",
}
LEAVING = ("privacy", "secure", "evaluation", "digests", "strategy", "data", "tasks", "rounds")
"""Keys of an experiment that decide what leaves a site, how often and how protected, in the order in which
their changes are told."""
TRUST = {
    "client_central": "; the server adds the noise, and sees this site's values without it",
    "none": "; no noise: a server that makes the model can read single samples out of what leaves",
}
"""What has to be said of a privacy.mode that hides nothing from the server."""
REFUSED = "this site would refuse it: "
LONGEST = 600
"""Characters of a line."""


def offer_in_words(offer: Offer, site: SiteConfig, earlier: Approval | None) -> list[str]:
    """The lines that `perennial site review` and `approve` print. earlier: the former approval."""
    # a loss or network of somebody else is imported for its words: only code that site.yaml names may be
    with use_only(site.plugins):
        lines = describe_asked(offer.experiment, site.policy, earlier)
    try:
        require_data(site, offer.experiment)
    except PolicyRefusal as refusal:
        lines.append(f"{REFUSED}{refusal}")
    return lines


def describe_asked(experiment: Experiment, policy: SitePolicy, earlier: Approval | None) -> list[str]:
    """What an experiment asks, one printable line each. earlier: the former approval."""
    return [clean_text(line, LONGEST) for line in _list_asked(experiment, policy, earlier)]


def _list_asked(experiment: Experiment, policy: SitePolicy, earlier: Approval | None) -> Iterator[str]:
    plan = Plan(experiment, build_registry_at_site(experiment))
    schedule = plan.registry.schedule
    yield f"experiment {experiment.name}, settings SHA-256 {experiment.digest}"
    yield from _list_changes(experiment, earlier)
    yield f"data: {_describe_data(experiment.data)}"
    for task in range(1, schedule.count + 1):
        names = ", ".join(plan.registry.classes[label] for label in schedule.list_classes(task))
        rounds = experiment.lead_rounds(task) + schedule.rounds[task - 1]
        yield f"  task {task}: {names} ({rounds} rounds)"
    yield f"training: {_describe_training(experiment)}"
    privacy, secure = experiment.privacy, experiment.secure
    hidden = UNIT["patient" if privacy.hidden_unit == "patient" else privacy.mode]
    yield f"protection: privacy.mode {privacy.mode}: hides {hidden}{TRUST.get(privacy.mode, '')}"
    if secure is not None and secure.masks:
        yield (
            f"sums: masked; the server learns sums of at least {secure.least} sites, unless more than "
            f"{secure.assumed_colluders} sites work together with it (docs/secure_aggregation.md)"
        )
    yield f"cost of the whole run: {_describe_cost(plan)}"
    yield "what leaves, and how often in the whole run:"
    for kind, words in WORDS.items():
        if times := _count_times(plan, kind):
            yield f"  {kind}, {times} times: {words}"
    if reported := _describe_reported(plan):
        yield f"  beside each update: {reported}"
    settings = [setting for asks in plan.asks.values() for setting in asks.settings.items()]
    if settings:
        words = (key if allowed is None else f"{key}: {allowed}" for key, allowed in settings)
        yield f"a request may set: {'; '.join(words)}"
    for words in (*describe_unmet_demands(policy, plan), *_describe_excess(policy, plan)):
        yield f"{REFUSED}{words}"


def _describe_data(data: DataConfig) -> str:
    size = "" if data.size is None else f", images as {data.size[0]} x {data.size[1]}"
    color = f", {data.color}" if data.color else ""
    normalise = data.normalise
    constants = "" if normalise is None else f", normalised by {normalise.mean} and {normalise.std}"
    limits = f", {data.test_fraction:g} held out for tests, {data.validation_fraction:g} for validation"
    return f"source {data.source}{size}{color}{constants}{limits}"


def _describe_training(experiment: Experiment) -> str:
    model, learner, memory, maps = experiment.model, experiment.learner, experiment.learner.memory, ""
    if model.pretrained is not None:
        maps = f" ({map_in_words(model.pretrained)}; all of it learns on)"
    elif model.features is not None:
        fixed = "; ".join(map_in_words(features) for features in model.features)
        fixed = f"fixed maps, which nobody trains here: {fixed}"
        if not experiment.strategy.trains:
            return f"none: sums alone; {fixed}"
        maps = f" ({fixed})"
    kept = "no exemplars kept" if memory is None else f"exemplars kept here by {memory.selection}"
    work = f"{learner.epochs} epochs a round in batches of {learner.batch_size}"
    return f"model {model.name}{maps}, {work}; {kept}"


def _describe_cost(plan: Plan) -> str:
    privacy, releases = plan.experiment.privacy, _list_entries(plan)
    if not releases:
        return "nothing is released"
    cost = compose(releases, privacy.delta, privacy.accountant)
    if math.isinf(cost.epsilon):
        return "epsilon infinite: something leaves without a proven protection"
    trust = "; against the server itself there is no guarantee" if cost.trusts_server else ""
    return (
        f"epsilon {cost.epsilon:.4g} for one {cost.unit} at delta {privacy.delta:g}, {len(releases)} "
        f"releases by the accountant {cost.accountant}{trust}"
    )


def _describe_excess(policy: SitePolicy, plan: Plan) -> Iterator[str]:
    """Yield what the whole run would charge the ledger, where that is more than policy.max_epsilon."""
    limit, releases = policy.limit, Counter(_list_entries(plan))
    if limit is None or not releases:
        return
    measure = limit.measure(releases)
    epsilon = measure.epsilon(measure.of_all(releases), limit.delta)
    if epsilon > limit.epsilon:
        yield (
            f"policy.max_epsilon: the whole run would cost epsilon {epsilon:.4g} as the ledger counts "
            f"({measure.unit}, delta {limit.delta:g}), allowed {limit.epsilon:g}"
        )


def _list_entries(plan: Plan) -> list[Entry]:
    """Everything that the whole run charges a site that takes part in all of it."""
    experiment, run, tasks = plan.experiment, "", len(plan.last_rounds)
    found = [charges.price_evaluation(experiment, run)] * plan.count_evaluations()
    if experiment.strategy.trains:
        found += [charges.price_update(experiment, run)] * _count_times(plan, "train")
    else:
        found += [charges.price_sums(experiment, run, task) for task in range(1, tasks + 1)]
    if (config := experiment.digests) is not None:
        guarantee = compute_guarantee(config, 1, config.largest or 1.0)
        found += charges.price_digests(experiment, run, config, guarantee) * tasks
    return [mechanism.entry for mechanism in found]


def _count_times(plan: Plan, kind: str) -> int:
    if kind in ("sparsity", "digest"):
        return plan.most(kind, 1) * len(plan.last_rounds)
    return sum(plan.most(kind, number) for number in range(1, plan.rounds + 1))


def _describe_reported(plan: Plan) -> str:
    privacy = plan.experiment.privacy
    clear = ["number of samples", "training loss", "number of steps", *plan.measurements]
    reported = [] if privacy.enabled else clear
    uploads = [upload for asks in plan.asks.values() for upload in asks.clear_uploads]
    reported += [upload for upload in uploads if upload not in (*plan.measurements, "steps")]
    return ", ".join(reported)


def _list_changes(experiment: Experiment, earlier: Approval | None) -> Iterator[str]:
    if earlier is None:
        yield "no experiment was approved here before"
        return
    before, after = flatten_settings(earlier.settings), flatten_settings(experiment.model_dump(mode="json"))
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    yield f"against the approval of {earlier.time}: {len(changed) or 'no'} settings differ"
    for key in sorted(changed, key=lambda key: (_place(key), key)):
        old, new = (clean_text(str(settings.get(key, "not set")), 120) for settings in (before, after))
        leaves = " (changes what leaves this site)" if _place(key) < len(LEAVING) else ""
        yield f"  {key}: {old} -> {new}{leaves}"


def _place(key: str) -> int:
    part = key.partition(".")[0]
    return LEAVING.index(part) if part in LEAVING else len(LEAVING)


def build_registry_at_site(experiment: Experiment) -> Registry:
    """Names and order of the classes, without reading what a stranger's experiment names.

    Raises ConfigError where the experiment neither lists them nor has sample data that come along.
    """
    data = experiment.data
    if data.classes is None and data.path is not None:
        raise ConfigError(
            "data.classes: missing; the data at data.path are the operator's, so an experiment for hospitals "
            "lists its classes"
        )
    if data.classes is None:
        return plan_registry(experiment)
    return build_registry(data.classes, experiment.tasks, experiment.seed)
