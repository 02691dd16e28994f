"""What follows from how an experiment measures its model, and the noise on the counts that sites report."""

from perennial.config.schema import ExperimentFields
from perennial.privacy.noised_counts import CountNoise


def count_noise(experiment: ExperimentFields) -> CountNoise | None:
    """The noise on counts of held-out samples; None without evaluation.noise_multiplier."""
    found = experiment.evaluation
    if found.noise_multiplier is None:
        return None
    return CountNoise(found.noise_multiplier, found.clip_counts or 1.0)


def asks_for_tables(experiment: ExperimentFields) -> bool:
    """Whether sites are asked for tables of counts: not with noise, of which tables would need too much."""
    found = experiment.evaluation
    return found.federated and found.measures and found.noise_multiplier is None


def fits_temperature(experiment: ExperimentFields) -> bool:
    """Whether a temperature is fitted on the sites' validation samples before tables are made."""
    return asks_for_tables(experiment) and experiment.data.validation_fraction > 0


def count_subgroups(experiment: ExperimentFields) -> int:
    """Number of subgroups in the tables, 0 without data.subgroup."""
    return 0 if experiment.data.subgroup is None else len(experiment.data.subgroup.values)


def require_calibration(experiment: ExperimentFields) -> None:
    """Raises ValueError if prediction sets or operating points are asked for without calibration samples."""
    asked = "coverage" if experiment.evaluation.coverage is not None else "operating_points"
    if not getattr(experiment.evaluation, asked):
        return
    if experiment.data.calibration_fraction == 0:
        raise ValueError(
            f"data.calibration_fraction: missing; evaluation.{asked} needs samples that nothing else is "
            "fitted to, 0.1 of them for instance"
        )
    if not asks_for_tables(experiment):
        raise ValueError(
            f"evaluation.{asked}: sites hold the calibration samples and tell their exact counts; allowed "
            "with evaluation.federated and evaluation.measures, and without evaluation.noise_multiplier"
        )


def require_covered_counts(experiment: ExperimentFields) -> None:
    """Raises ValueError if counts would leave without an accountant, or their noise would hide nothing.

    Noise hides nothing where no counts leave, no privacy mode claims anything, or another setting voids the
    claim; its size is not judged so. Raises ValueError too if evaluation.clip_counts is there with a mode
    that does not hide a whole site, or is lacking with one that does.
    """
    privacy, found = experiment.privacy, experiment.evaluation
    if found.noise_multiplier is None:
        if found.clip_counts is not None:
            raise ValueError("evaluation.clip_counts: found without evaluation.noise_multiplier; remove it")
        if privacy.enabled and found.federated:
            raise ValueError(
                "evaluation.federated: sites would release counts that no accountant covers; with "
                f"privacy.mode {privacy.mode!r} give them noise by evaluation.noise_multiplier, or set "
                "evaluation.federated to false"
            )
        return
    if reason := _explain_void_noise(experiment):
        raise ValueError(f"evaluation.noise_multiplier: {reason}")
    if (privacy.hidden_unit == "site") != (found.clip_counts is not None):
        raise ValueError(
            f"evaluation.clip_counts: found {found.clip_counts} with privacy.mode {privacy.mode!r}; allowed "
            "a number in the modes that hide a whole site, whose counts are bounded by it, and no other"
        )
    CountNoise(found.noise_multiplier, found.clip_counts or 1.0).check()


def _explain_void_noise(experiment: ExperimentFields) -> str:
    """Why noise on counts would make a false claim; '' if it would not."""
    privacy = experiment.privacy
    if not experiment.evaluation.federated:
        return "found with evaluation.federated false, so that no counts leave; remove one of them"
    if not privacy.enabled:
        return "found with privacy.mode 'none', which claims nothing; choose a mode, or remove it"
    if privacy.mode == "sample" and experiment.learner.classifier == "nearest_mean":
        return (
            "with learner.classifier nearest_mean one exemplar changes the answer on every held-out sample, "
            f"and the noise hides what one {privacy.hidden_unit} adds; allowed with classifier head"
        )
    if privacy.bayesian:
        return "counts are a release whose distances nobody samples; not with privacy.bayesian"
    return ""
