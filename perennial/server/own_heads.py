"""Each hospital's own head of a run whose data name their sites, and what own and federated heads are worth.

A simulation makes them at its end, where all sites' folders lie in the run's; a real site makes its own when
it judges the finished model, and tells nobody.
"""

import json
from pathlib import Path
from typing import Any

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.simulation import simulated_federation
from perennial.foundation.errors import PerennialError
from perennial.foundation.files import replace_file
from perennial.models.saved import GLOBAL_MODEL, PERSONAL_MODEL, load_saved
from perennial.strategies.analytic.personal_head import keep_personal_head

BLOCK = "own_heads"


def has_own_heads(experiment: Experiment) -> bool:
    """Whether a run's sites get heads of their own: those of a closed form whose data name their sites."""
    natural = experiment.data.partition.kind == "natural" and not experiment.data.only_at_sites
    return experiment.strategy.name == "analytic" and natural


def forget_own_heads(folder: Path) -> None:
    """Remove the sites' own heads from a run's folder: they began at another federated head."""
    for path in folder.glob(f"sites/*/{PERSONAL_MODEL}"):
        path.unlink()


def write_own_heads(folder: Path, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make the own heads of a finished run anew; returns summary.json's content, in which their block is.

    without: sites that were withdrawn. Where the run's data cannot be read any more there are none.
    """
    path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text())
    forget_own_heads(folder)
    experiment = load_experiment(folder / "experiment.yaml")
    try:
        sites = simulated_federation(experiment).sites
    except PerennialError:
        sites = {}
    saved = load_saved(folder / GLOBAL_MODEL)
    found: dict[str, Any] = {}
    for name, data in sites.items():
        if name not in without:
            own = folder / "sites" / name
            figures = keep_personal_head(data, saved.model, saved.classes, experiment.model_dump_json(), own)
            found |= {} if figures is None else {name: figures}
    summary[BLOCK] = found
    replace_file(path, (json.dumps(summary, indent=2) + "\n").encode(), mode=0o644)
    from perennial.server.report.write import write_report

    write_report(folder)
    return summary
