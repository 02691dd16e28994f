"""Trials as they are written down."""

from collections.abc import Iterable
from typing import Any

from benchmarks.twins.cases import cases
from benchmarks.twins.trial import Trial, trials


def row(trial: Trial) -> dict[str, Any]:
    """A trial as it is written down."""
    return {
        "case": trial.case,
        "mode": trial.mode,
        "pair": trial.pair,
        "way": trial.way,
        "messages": trial.messages,
        "requests": sorted(trial.requests),
        "charges": sorted(trial.charges),
        "refused": len(trial.refused),
        "covered": sorted({one.path.split("/")[0] for one in trial.differences if one.covered}),
        "listed": sorted({one.listed for one in trial.differences if one.listed}),
        "moved": [max(found) for found in _shares(trial)],
        "objections": trial.objections,
    }


def _shares(trial: Trial) -> Iterable[list[float]]:
    shares = [one.moved / one.bound for one in trial.differences if one.moved is not None and one.bound]
    return [shares] if shares else []


def rows_of(name: str) -> tuple[str, list[dict[str, Any]]]:
    """The rows of a case; none where it could not be run, so that the others need not wait for it."""
    case = next(case for case in cases() if case.name == name)
    try:
        return name, [row(trial) for trial in trials(case)]
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return name, []
