"""Federated class-incremental learning that hospitals can run.

    from perennial import load_experiment, run

    result = run("experiments/quickstart.yaml", seed=2)
    print(result.accuracy_matrix)

The names below are all that a program needs; each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from perennial.config.experiment import Experiment, load_experiment
    from perennial.config.strategies import Asks
    from perennial.data.samples import Samples, Source
    from perennial.engine.callbacks import Callback
    from perennial.engine.sweep_table import Sweep
    from perennial.engine.sweeps import run_sweep
    from perennial.foundation.errors import PerennialError
    from perennial.learning.losses import Batch, Loss
    from perennial.learning.site_method import LocalTurn, SiteMethod
    from perennial.library import Model, Prediction, Run, load_run, run
    from perennial.models.layers import grown
    from perennial.strategies.base import IncrementalStrategy, Wrapper
    from perennial.strategies.fedavg import FedAvg
    from perennial.strategies.round.context import Aggregator, Around, RoundContext
    from perennial.strategies.round.request import Traits

_NAMES = {
    "Callback": "perennial.engine.callbacks",
    "Experiment": "perennial.config.experiment",
    "load_experiment": "perennial.config.experiment",
    "run": "perennial.library",
    "load_run": "perennial.library",
    "run_sweep": "perennial.engine.sweeps",
    "Sweep": "perennial.engine.sweep_table",
    "Run": "perennial.library",
    "Model": "perennial.library",
    "Prediction": "perennial.library",
    "PerennialError": "perennial.foundation.errors",
    # for methods of one's own
    "IncrementalStrategy": "perennial.strategies.base",
    "FedAvg": "perennial.strategies.fedavg",
    "Aggregator": "perennial.strategies.round.context",
    "Around": "perennial.strategies.round.context",
    "RoundContext": "perennial.strategies.round.context",
    "Traits": "perennial.strategies.round.request",
    "Asks": "perennial.config.strategies",
    "Wrapper": "perennial.strategies.base",
    "Loss": "perennial.learning.losses",
    "Batch": "perennial.learning.losses",
    "SiteMethod": "perennial.learning.site_method",
    "LocalTurn": "perennial.learning.site_method",
    "Source": "perennial.data.samples",
    "Samples": "perennial.data.samples",
    "grown": "perennial.models.layers",
}

__all__ = [
    "Aggregator",
    "Around",
    "Asks",
    "Batch",
    "Callback",
    "Experiment",
    "FedAvg",
    "IncrementalStrategy",
    "LocalTurn",
    "Loss",
    "Model",
    "PerennialError",
    "Prediction",
    "RoundContext",
    "Run",
    "Samples",
    "SiteMethod",
    "Source",
    "Sweep",
    "Traits",
    "Wrapper",
    "grown",
    "load_experiment",
    "load_run",
    "run",
    "run_sweep",
]


def __getattr__(name: str) -> Any:
    """Import a name of this page when it is first asked for, so that importing the package costs nothing."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
