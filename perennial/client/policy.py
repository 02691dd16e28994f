"""What this site answers, and what may leave it.

The policy is the hospital's; nothing in a message can widen it. A release is judged by what really hides it,
which the experiment's privacy.mode alone does not say: the mode must be the one that the hospital demands,
and its claim must be true of these settings. Each kind of release has its one check here, before anything is
computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from perennial.client.identity import Identity
from perennial.config.combinations import explain_uncovered_sums
from perennial.config.evaluation import count_noise
from perennial.config.experiment import Experiment
from perennial.config.site import Answer, Demand, Release, SitePolicy
from perennial.foundation.errors import PolicyRefusal, PrivacyError
from perennial.privacy.combinations import ReleaseProtection, refuse_false_claims
from perennial.privacy.config import DigestConfig


def check_answer(policy: SitePolicy, kind: Answer) -> None:
    """Raises PolicyRefusal when the site does not answer this kind of request."""
    if kind not in policy.answers:
        raise PolicyRefusal(
            f"policy.answers: {kind!r} is not answered here; answered: {', '.join(policy.answers) or 'none'}"
        )


def check_update(policy: SitePolicy, experiment: Experiment, **claim: Any) -> None:
    """Refuse an update, or the sums for class means that are protected like one, unless it may leave.

    claim: facts about the turn, as check_claim() takes them. Raises PrivacyError when the experiment's claim
    would be false, PolicyRefusal when the site demands another protection.
    """
    check_claim(experiment, **claim)
    check_secure(policy, experiment)
    check_demand(policy, experiment)


def check_demand(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse to compute in an experiment without the protection that this site demands.

    Asked of every request before any data are read: not even what stays here may be computed, because whether
    it works can show later. Digests and sparsity vectors alone are judged by noise of their own.
    """
    privacy = experiment.privacy
    unit = f" and unit {privacy.hidden_unit!r}" if privacy.mode == "sample" else ""
    mode = "patient" if privacy.hidden_unit == "patient" else privacy.mode
    _check_protection(policy, mode, f"the experiment has privacy.mode {privacy.mode!r}{unit}")


def check_digests(policy: SitePolicy, experiment: Experiment, digests: DigestConfig) -> None:
    """Refuse digests unless they may leave; errors as check_update()."""
    check_claim(experiment)
    _refuse_beside_sums(policy, "digests")
    if not digests.protects or digests.labels_in_the_clear:
        # with noise on features and labels, what one sample adds is hidden by a proof
        check_floor(policy, "digest", digests.per_digest)
    if not digests.protects:
        _check_protection(policy, "none", f"digests.protection {digests.protection!r} proves nothing")
    elif policy.require_privacy != "none" or policy.max_epsilon is not None:
        raise PolicyRefusal(
            f"policy.require_privacy, max_epsilon: digests.protection {digests.protection!r} hides a sample "
            "that is replaced in its row, and rows that are ordered anew are mixed anew, which no noise "
            "covers; a site that demands a protection, or has a budget, lends no digests"
        )


def check_sparsity(policy: SitePolicy, experiment: Experiment, *, noised: bool) -> None:
    """Refuse a sparsity vector, noised or not, unless it may leave; errors as check_update()."""
    check_claim(experiment, sparsity="sample" if noised else "none")
    _refuse_beside_sums(policy, "sparsity vectors")
    if noised:
        _check_protection(policy, "sample", "a sparsity vector with noise hides one sample")
    else:
        _check_protection(policy, "none", "a sparsity vector without noise hides nothing")


def check_statistics(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse sums of features unless they may leave; errors as check_update()."""
    check_claim(experiment)
    check_secure(policy, experiment)
    privacy = experiment.privacy
    if privacy.enabled and (why := explain_uncovered_sums(experiment)):
        raise PrivacyError(f"privacy.mode {privacy.mode}: {why}")
    noise = "with the experiment's noise" if privacy.enabled else "without noise"
    _check_protection(policy, privacy.mode, f"sums of features leave {noise}")


def check_evaluation(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse counts of right answers, exact or noised, unless they may leave; errors as check_update()."""
    check_secure(policy, experiment)
    privacy = experiment.privacy
    if count_noise(experiment) is not None:
        check_claim(experiment)
        if privacy.mode == "client_central":
            check_promise("evaluation.noise_multiplier", experiment.evaluation.noise_multiplier)
        why = f"the experiment's noise on counts hides one {privacy.hidden_unit}"
        kind = "patient" if privacy.hidden_unit == "patient" else privacy.mode
        _check_protection(policy, kind, why)
        return
    _check_protection(policy, "none", "counts of right answers leave without noise")
    if privacy.enabled:
        raise PolicyRefusal(
            f"privacy.mode {privacy.mode}: counts of right answers leave without noise, and no "
            "accountant covers them; allowed with evaluation.noise_multiplier alone"
        )


def check_compared_heads(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse the exact right answers of compared heads unless they may leave; errors as check_update().

    There is no noise on them, so that no privacy mode covers them, in a masked sum neither.
    """
    check_secure(policy, experiment)
    mode = experiment.privacy.mode
    if experiment.privacy.enabled or count_noise(experiment) is not None:
        raise PrivacyError(
            f"privacy.mode {mode}: compare_heads: right answers of each head leave exact, and neither a mask "
            "nor the noise on counts of evaluations covers them; allowed with privacy.mode none alone"
        )
    _check_protection(policy, "none", "right answers of compared heads leave without noise")


def check_promise(key: str, multiplier: float | None) -> None:
    """Raises PolicyRefusal if the server promises no noise. multiplier: under `key` of the experiment."""
    if not multiplier:
        raise PolicyRefusal(f"{key}: found {multiplier}, allowed a number above 0: the noise hides this site")


def _refuse_beside_sums(policy: SitePolicy, what: str) -> None:
    if policy.require_secure:
        raise PolicyRefusal(f"policy.require_secure: {what} are this site's own, and no part of a masked sum")


def check_secure(policy: SitePolicy, experiment: Experiment, sites: int | None = None) -> None:
    """Raises PolicyRefusal if the experiment's masked sums do not meet what the policy demands of them.

    sites: how many are in the sum; None: not known yet.
    """
    secure = experiment.secure
    if secure is None:
        if policy.require_secure:
            raise PolicyRefusal(
                "policy.require_secure: this site's values leave in masked sums only; the experiment has no "
                "`secure`"
            )
        return
    if policy.require_secure and not secure.masks:
        raise PolicyRefusal("policy.require_secure: the experiment has secure.masks false")
    for key, found in (("least_sites", secure.least), ("assumed_colluders", secure.assumed_colluders)):
        demanded = getattr(policy, key)
        if found < demanded:
            raise PolicyRefusal(f"policy.{key}: this site demands {demanded}; the experiment has {found}")
    if sites is not None and sites < policy.least_sites:
        raise PolicyRefusal(
            f"policy.least_sites: {sites} sites; this site takes part from {policy.least_sites} on"
        )


WORDS: dict[Answer, str] = {
    "train": "updates of the model, and sums for class means",
    "evaluate": "counts of right answers",
    "measures": "tables of counts",
    "digest": "digests of samples",
    "sparsity": "sparsity vectors",
    "statistics": "sums of features",
}
"""What leaves in answer to each kind of request; docs/what_leaves_a_site.md has it field by field."""


def describe_leaving(policy: SitePolicy) -> Iterator[str]:
    """The lines of `perennial site check`: what may leave under this policy, and whether noise covers it."""
    demand, budget = policy.require_privacy, policy.max_epsilon
    if demand == "client_central":
        noise = "the server adds the noise, and sees this site's values without it"
    elif demand != "none":
        noise = f"with noise that hides one {policy.unit}"
    elif budget is not None:
        noise = "with the noise of the approved experiment, which the server may add (client_central)"
    elif policy.require_secure:
        noise = "in masked sums WITHOUT NOISE: a server that lies can read single samples out of them"
    else:
        noise = "WITHOUT NOISE: the server can read single samples out of it"
    yield "what may leave, and whether noise covers it:"
    for answer in policy.answers:
        yield f"  {answer}: {WORDS[answer]}: {noise}"
    if not policy.answers:
        yield "  nothing: no request is answered"
    if budget is not None:
        yield (
            f"budget: all charged releases of all runs, together epsilon {budget:g} at delta "
            f"{policy.delta:g} for one {policy.unit or 'site'}"
        )


STRONGER: dict[Demand, tuple[Demand, ...]] = {
    "patient": ("sample", "sample_shared"),
    "sample": ("sample_shared",),
}
"""What else a protection serves: it hides as much, and more or from more."""


def _check_protection(policy: SitePolicy, kind: Demand, why: str) -> None:
    """Raises PolicyRefusal unless what hides a release is what the policy demands, and what a budget covers.

    kind: in the words of policy.require_privacy. why: what makes it so.
    """
    if policy.require_privacy not in {"none", kind, *STRONGER.get(kind, ())}:
        raise PolicyRefusal(f"policy.require_privacy: this site demands {policy.require_privacy!r}; {why}")
    if kind == "none" and policy.max_epsilon is not None:
        # said before the data are read: a refusal by the ledger would come after others that tell of records
        raise PolicyRefusal(f"policy.max_epsilon: no budget covers what has no noise; {why}")


RELEASES: dict[Release, str] = {
    "update": "an update",
    "evaluate": "counts of right answers",
    "class_means": "a class's sum",
    "digest": "a digest",
    "sparsity": "a sparsity vector",
    "measurements": "a measurement",
    "statistics": "sums of features",
    "class_counts": "counts of samples",
    "compare_heads": "counts of right answers",
}


def hides_count(identity: Identity) -> bool:
    """Whether noise of this site hides how many samples a release is computed from.

    Then no floor is asked of the exact number: whether the site refuses would tell it. A simulated site has
    nothing to hide, and one without samples takes no part.
    """
    privacy = identity.experiment.privacy
    return identity.deployed and privacy.enabled and privacy.mode != "client_central"


def protects_records(identity: Identity) -> bool:
    """Whether records may decide nothing that shows: noise hides them, or the policy demands it."""
    return hides_count(identity) or (identity.deployed and identity.policy.require_privacy != "none")


def is_exempt(policy: SitePolicy, release: Release) -> bool:
    """Whether policy.below_floor lets this release leave however few samples it is computed from."""
    return release in policy.below_floor


def check_floor(policy: SitePolicy, release: Release, samples: int) -> None:
    """Raises PolicyRefusal when a release comes from too few samples; their number is not told."""
    if samples < policy.min_samples and not is_exempt(policy, release):
        raise PolicyRefusal(
            f"policy.min_samples: {RELEASES[release]} would be computed from fewer than "
            f"{policy.min_samples} samples"
        )


def find_withheld(
    policy: SitePolicy, release: Release, cells: Sequence[int], *within: Sequence[int]
) -> set[int]:
    """Indices of the counts that must not leave because they are below policy.min_samples.

    cells: a count of samples for each class or group. within: counts inside each cell that would leave with
    it, such as right answers; a cell is withheld too if such a count, or what it leaves of the cell, is
    below the floor.

    Empty cells are withheld too, and further ones, smallest first, until the withheld ones are two or more
    and have at least min_samples samples together. So nobody can compute one from a known total, or tell an
    empty class from a small one. With a floor of 1, or for an exempt release, nothing is withheld.
    """
    if policy.min_samples == 1 or is_exempt(policy, release):
        return set()
    least = [
        min(count, *(least for part in within for least in (part[cell], count - part[cell])))
        if within
        else count
        for cell, count in enumerate(cells)
    ]
    small = {cell for cell, count in enumerate(least) if count < policy.min_samples}
    rest = sorted((count, cell) for cell, count in enumerate(cells) if cell not in small)
    while small and rest and (len(small) < 2 or sum(cells[c] for c in small) < policy.min_samples):
        small.add(rest.pop(0)[1])
    return small


def check_claim(
    experiment: Experiment,
    *,
    segments: int = 1,
    sparsity: ReleaseProtection | None = None,
    weights_use_metrics: bool = False,
    clear_uploads: Sequence[str] = (),
    normalisation_from_data: bool = False,
) -> None:
    """Refuse an experiment whose privacy claim would be false; mode none claims nothing.

    The keywords are facts that the settings alone do not say, as in refuse_false_claims; leave them out if
    you do not know them.

    Raises PrivacyError with every reason.
    """
    if not experiment.privacy.enabled:
        return
    # the losses need PyTorch, which a site without a claim need not import for this
    from perennial.learning.objective import list_coupled_terms

    learner, memory, digests = experiment.learner, experiment.learner.memory, experiment.digests
    refuse_false_claims(
        experiment.privacy,
        norm=experiment.model.resolved_norm,
        memory_selection=memory.selection if memory else None,
        memory_displaces=memory is not None and memory.share is None,
        balanced_replay=memory is not None and memory.balanced,
        coupled_terms=list_coupled_terms(learner),
        needs_every_class=learner.classification.name == "balanced_softmax"
        and learner.classification.sign < 0,
        segments=segments,
        weights_use_metrics=weights_use_metrics,
        clear_uploads=clear_uploads,
        digest=None
        if digests is None
        else "sample"
        if digests.protects and not digests.labels_in_the_clear
        else "none",
        sparsity=sparsity,
        normalisation_from_data=normalisation_from_data,
    )
