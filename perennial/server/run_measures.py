"""The measures of a run at the end of a task: from the server's test samples, else from the sites' counts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perennial.config.experiment import Experiment
from perennial.learning.evaluation_tables import EvaluationTables
from perennial.learning.scored import Scored
from perennial.server.measures.assemble import assemble, build_prediction_sets, estimate_patient_intervals
from perennial.server.measures.calibration import is_at_end
from perennial.server.measures.headline import choose_operating_points
from perennial.server.measures.record import FILE, Measures, write_measures
from perennial.server.position import Position
from perennial.server.site_counts import SiteCounts


def write_task_measures(
    folder: Path,
    position: Position,
    scored: Scored | None,
    patients: np.ndarray | None,
    reported: SiteCounts,
    unlearnt: Sequence[int],
) -> None:
    """Write measures.json at the end of a task; without any, none of an earlier task stays.

    Arguments as for measure_task.

    reported: the sites' counts. unlearnt: labels of which the model learnt from no record.
    """
    names = list(position.registry.classes[: position.num_classes])
    found = measure_task(
        position.experiment,
        position.progress.task,
        names,
        scored,
        patients,
        reported,
        one_classifier=position.one_classifier,
    )
    if found is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        notes = [*found.notes, *_describe_unlearnt([names[label] for label in unlearnt])]
        write_measures(folder, found.model_copy(update={"notes": notes}))


def measure_task(
    experiment: Experiment,
    task: int,
    classes: list[str],
    central: Scored | None,
    patients: np.ndarray | None,
    sites: SiteCounts,
    *,
    one_classifier: bool = True,
) -> Measures | None:
    """All measures after a task; None if nothing but right answers was counted.

    central: the server's test samples, scored; None: the sites' tables are measured. With both, the figures
    are the server's, and sites add validation, calibration and subgroups. patients: (n,) their patients, from
    0; if one has several samples, intervals come from drawing patients. sites: what they reported.
    one_classifier: whether sites judged the model with the classifier that the server has, and not each with
    class means of its own; if not, their tables are not combined with the server's.
    """
    tables = _combine_tables(central, sites.tables.total if one_classifier or central is None else None)
    if tables is None:
        return None
    temperature = sites.temperature
    intervals = None
    if central is not None and patients is not None:
        known, numbered = np.unique(patients, return_inverse=True)
        if len(known) < len(patients):
            intervals = estimate_patient_intervals(central, numbered, temperature)
    coverage = experiment.evaluation.coverage
    # the counts of each subgroup, from the sites that reported it
    subgroup = experiment.data.subgroup if len(tables.subgroups) else None
    parts = {} if subgroup is None else dict(zip(subgroup.values, tables.subgroups, strict=True))
    sets = None
    if coverage is not None:
        sets = build_prediction_sets(tables, classes, coverage, _explain_void(sites, one_classifier))
    return assemble(
        tables,
        classes,
        intervals,
        temperature,
        sites.tables.by_site,
        parts,
        source="sites" if central is None else "server",
        task=task,
        held_out=sites.held_out if central is None else len(central),
        subgroup_column="" if subgroup is None else subgroup.column,
        prediction_sets=sets,
        operating_points=choose_operating_points(tables, classes, experiment.evaluation.operating_points),
        notes=_list_notes(experiment, central, sites),
    )


def _combine_tables(central: Scored | None, reported: EvaluationTables | None) -> EvaluationTables | None:
    """The server's tables with the sites' validation and calibration samples; theirs where it has none."""
    if central is None:
        return reported
    tables = central.build_tables()
    if reported is None:
        return tables
    return replace(
        tables,
        validation=reported.validation,
        calibration=reported.calibration,
        subgroups=reported.subgroups,
    )


def _explain_void(sites: SiteCounts, one_classifier: bool) -> str:
    if sites.tables.total is None:
        return "no site sent calibration counts"
    if not one_classifier:
        return "each site classifies by class means of its own, so there is no one model to calibrate"
    if sites.tables.suppressed:
        return (
            "some sites keep small counts to themselves, so the calibration samples are not those of all "
            "patients, and the stated coverage is not guaranteed"
        )
    return ""


def _list_notes(experiment: Experiment, central: Scored | None, sites: SiteCounts) -> list[str]:
    notes = []
    if is_at_end(sites.temperature):
        notes.append(
            f"The temperature {sites.temperature:g} is the end of those that were tried; the best may lie "
            "beyond it, and stated probabilities are to be taken with care."
        )
    if central is None and sites.tables.total is not None:
        rest = sites.held_out - sites.tables.total.samples
        if rest > 0:
            notes.append(
                f"{rest:,} of {sites.held_out:,} held-out samples are at sites whose policy does not answer "
                "measures, or were withheld; they count in the accuracy over tasks and not here."
            )
    if experiment.data.patient is not None and central is None:
        notes.append(
            "Intervals take samples for independent. Where a patient has several, true intervals are wider."
        )
    return notes


def _describe_unlearnt(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        f"The model learnt from no record of {', '.join(names)}: no site had one to train with, or a floor "
        "or a protection kept it there. Of every sample it states probability 0 for "
        f"{'this class' if len(names) == 1 else 'these classes'}."
    ]


WITHDRAWN = "records were withdrawn, and nobody has calibrated the model that is left"


def build_confidence_facts(
    measures: Measures | None, classes: int, *, one_classifier: bool = True, withdrawn: bool = False
) -> dict[str, Any]:
    """The fields of a saved model's Confidence; {} if it was not calibrated with all its classes.

    classes: how many the model tells apart. withdrawn: whether records of the model were withdrawn.
    """
    if measures is None or len(measures.classes) != classes or not one_classifier:
        return {"void": WITHDRAWN} if withdrawn else {}
    sets = measures.prediction_sets
    return {
        "temperature": measures.calibration.temperature,
        "coverage": None if sets is None else sets.coverage,
        "void": "" if sets is None else sets.void,
        "points": {
            each.name: [each.asked, each.log_odds, *[each.by] * (each.by == "sensitivity")]
            for each in measures.operating_points
            if each.log_odds is not None
        },
        "thresholds": None
        if sets is None
        else [sets.thresholds[each.name].log_odds for each in measures.classes],
    }
