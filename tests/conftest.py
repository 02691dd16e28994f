"""What all tests have in common."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import settings

settings.register_profile("few", max_examples=30, deadline=None)
settings.load_profile("few")
HERE = str(Path(__file__).parent)
WHOLE_RUNS = {"run_in_process", "attacked_run", "run_table", "serve"}
"""Functions that run a whole experiment."""
REFUSALS = {"ConfigError", "PrivacyError", "PerennialError", "ValidationError"}
"""What a test expects in place of a run."""
DEPTH = 3
"""Calls among functions of the tests that are followed."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that runs an experiment for each of many cases, the first is fast and the others slow.

    Refusals come before a run, and are fast.
    """
    seen: set[tuple[str, FunctionType]] = set()
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            function = getattr(item.function, "__func__", item.function)
            key = (item.nodeid.partition("[")[0], function)
            refuses = not REFUSALS.isdisjoint(_names_of(function.__code__))
            if key in seen and not refuses and runs_an_experiment(function):
                item.add_marker(pytest.mark.slow)
            seen.add(key)


def runs_an_experiment(function: FunctionType, depth: int = DEPTH) -> bool:
    """Whether a function, or one of the tests' own functions that it names, runs a whole experiment."""
    names = set(_names_of(function.__code__))
    if names & WHOLE_RUNS:
        return True
    called = (function.__globals__.get(name) for name in names)
    # pytest gives a test module the name of its file alone, so the file says whose a function is
    ours = (
        one for one in called if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(HERE)
    )
    return depth > 0 and any(runs_an_experiment(one, depth - 1) for one in ours)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out flushes of temporary files in the tests' own process.

    What a power cut leaves is not seen by a test; tests of flushing put their own in its place, and processes
    that tests start flush as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def state_of_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites that name no ledger_tip note theirs in a folder of the test, and not in the user's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("user-state", numbered=True)))


REPEATED = {
    *("test_cohort_runs", "test_secure_analytic", "test_pp_fcil", "test_rivals_runs", "test_compositions"),
    *("test_durability", "test_resume", "test_consolidation", "test_bayesian_record"),
    *("test_noised_sums", "test_golden", "test_privacy_attacks", "test_run_epsilon"),
}
"""Modules that compare private runs to the bit, in one process."""


@pytest.fixture(autouse=True)
def repeated_noise(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let noise repeat where tests compare bits; the product's noise never does."""
    if request.module.__name__.rpartition(".")[2] not in REPEATED:
        yield
        return
    from tests.seeded_noise import repeatable_noise

    with repeatable_noise():
        yield
