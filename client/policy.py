"""What this site answers. The policy is the hospital's; nothing in a message can widen it."""

from config.experiment import Experiment
from config.site import Answer, SitePolicy
from foundation.errors import PolicyRefusal


def check_answer(policy: SitePolicy, kind: Answer) -> None:
    """Raises PolicyRefusal when the site does not answer this kind of request."""
    if kind not in policy.answers:
        raise PolicyRefusal(
            f"policy.answers: {kind!r} is not answered here; answered: {', '.join(policy.answers) or 'none'}"
        )


def check_protection(policy: SitePolicy, experiment: Experiment) -> None:
    """Raises PolicyRefusal when the experiment's protection is not the one that the site demands."""
    if policy.require_privacy not in ("none", experiment.privacy.mode):
        raise PolicyRefusal(
            f"policy.require_privacy: this site demands {policy.require_privacy!r}, "
            f"the experiment has privacy.mode {experiment.privacy.mode!r}"
        )


def check_samples(policy: SitePolicy, found: int) -> None:
    """Raises PolicyRefusal below the site's least number of samples; the number itself is not told."""
    if found < policy.min_samples:
        raise PolicyRefusal(
            f"policy.min_samples: fewer than {policy.min_samples} samples to train on in this task"
        )


def check_evaluation(experiment: Experiment) -> None:
    """Raises PolicyRefusal when the counts would leave in the clear beside protected updates."""
    if experiment.privacy.enabled and not experiment.privacy.allow_unaccounted_metrics:
        raise PolicyRefusal(
            f"privacy.mode {experiment.privacy.mode}: counts of right answers leave without noise, and no "
            "accountant covers them; allowed with privacy.allow_unaccounted_metrics alone"
        )
