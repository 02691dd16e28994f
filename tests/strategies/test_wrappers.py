"""A strategy around another one hands on every hook that it does not change, and code keeps its distance."""

import ast
import importlib
import inspect
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from perennial.config.asks import Asks
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.strategies import base as base_module
from perennial.strategies import wrapper as wrapper_module
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import STRATEGIES, build_strategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.median import Median
from perennial.strategies.round.context import Aggregator, Around
from perennial.strategies.round.disclosures import Disclosures
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.traits import Traits
from perennial.strategies.wrapper import Wrapper
from tests.rounds import context

ROOT = Path(__file__).parents[2]


class Noted(FedAvg):
    """Notes which hooks of a run reach it, and answers with something of its own."""

    traits = Traits(staleness=7, runs_per_cluster=False, requires="what nobody has")
    asks = Asks(clear_uploads=("steps",))

    def __init__(self) -> None:
        super().__init__(max_update_norm=3.0)
        self.called: list[Any] = []

    def attach(self, run: Any) -> None:
        self.called.append(run)

    def begin_task(self, task: Any) -> None:
        self.called.append(task)

    def check_layers(self, arrays: Any) -> None:
        self.called.append(arrays)

    def prepare_round(self, ctx: Any) -> None:
        self.called.append(ctx)

    def serve_group(self, whole: Any, own: Any, former: Any) -> None:
        self.called.append((whole, own, former))

    def group_models(self) -> dict[str, Any]:
        return {"0": {}}

    def summary_blocks(self) -> dict[str, Any]:
        return {"own": 1}

    def state_dict(self) -> dict[str, Any]:
        return {"own": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called.append(state)


@pytest.mark.parametrize("hook", ["attach", "begin_task", "check_layers", "prepare_round"])
def test_a_hook_of_the_run_reaches_the_innermost_strategy(hook: str) -> None:
    inner = Noted()
    outer = Wrapper(Wrapper(inner))
    given = object()
    getattr(outer, hook)(given)
    assert inner.called == [given]


def test_what_stays_and_what_is_said_is_the_bases() -> None:
    inner = Noted()
    outer = Wrapper(Wrapper(inner))
    assert outer.traits == inner.traits and outer.max_update_norm == 3.0
    assert outer.disclosures() == Disclosures(clear_uploads=("steps",))
    assert outer.group_models() == {"0": {}} and outer.summary_blocks() == {"own": 1}
    assert outer.weight(Admitted("a", {}, 0.0, 5)) == 5.0
    assert outer.state_dict() == {"base/base/own": 2}
    outer.load_state_dict(outer.state_dict())
    whole, former = (Wrapper(Wrapper(Noted())) for _ in range(2))
    outer.serve_group(whole, {}, former)
    outer.serve_group(whole, {}, None)
    bases = [each.base.find(Noted) for each in (whole, former)]
    assert inner.called == [{"own": 2}, (bases[0], {}, bases[1]), (bases[0], {}, None)]


def test_a_strategy_of_a_kind_is_found_inside_others() -> None:
    inner = FedAvg()
    outer = Wrapper(Wrapper(inner))
    assert outer.find(FedAvg) == inner and outer.find(Wrapper) == outer and outer.find(Median) is None


def test_an_aggregator_around_another_one_changes_nothing_by_itself() -> None:
    class Noting(Aggregator):
        notes: ClassVar[list[str]] = []

        def while_waiting(self) -> None:
            self.notes.append("waiting")

        def add(self, reply: Admitted) -> None:
            self.notes.append(reply.site)

        def complete(self) -> int:
            return 4

        def result(self) -> dict[str, Any]:
            return {"w": 1}

    base = Noting(context({}))
    around = Around(base.ctx, base)
    around.while_waiting()
    around.add(Admitted("a", {}, 0.0, 1))
    assert base.notes == ["waiting", "a"] and around.complete() == 4 and around.result() == {"w": 1}


def test_a_wrapper_of_a_base_whose_sites_take_turns_hands_on_the_whole_round() -> None:
    class InTurn(FedAvg):
        traits = Traits(aggregates_in_parallel=False)

        def train_round(self, grid: Any, request: Any) -> RoundOutcome:
            return RoundOutcome(details={"bound": request.max_update_norm})

        def configure_train(self, *_: Any) -> Any:
            return ["hop"]

        def aggregate_train(self, *_: Any) -> Any:
            return "model", None

    wrapper = Wrapper(InTurn(), max_update_norm=2.0)
    request = context({}).request
    assert wrapper.train_round(cast(Any, None), request).details == {"bound": 2.0}
    assert list(wrapper.configure_train(1, ArrayRecord(), ConfigRecord(), cast(Any, None))) == ["hop"]
    assert wrapper.aggregate_train(1, []) == ("model", None)


def test_what_a_method_requires_is_refused_under_flowers_own_start() -> None:
    for strategy in (Noted(), Wrapper(Noted())):
        with pytest.raises(ConfigError, match="needs what nobody has"):
            strategy.configure_train(1, ArrayRecord(), ConfigRecord(), cast(Any, None))


def test_base_and_wrapper_are_short_enough_to_be_read_at_once() -> None:
    files = (base_module.__file__, wrapper_module.__file__)
    assert sum(len(Path(str(file)).read_text().splitlines()) for file in files) <= 250


def test_no_strategy_checks_whether_a_run_has_begun() -> None:
    """`self.run` is the run, or an error that says what is missing."""
    found = [
        f"{path.name}: {line.strip()}"
        for room in ("strategies", "baselines")
        for path in sorted((ROOT / "perennial" / room).rglob("*.py"))
        for line in path.read_text().splitlines()
        if "assert self._services" in line or "assert self._run" in line
    ]
    assert found == []


@pytest.mark.parametrize("name", ["digest_synthesis", "clustered_personalisation", "contribution"])
def test_what_releases_more_than_the_noised_model_has_no_bound(name: str) -> None:
    more = {"clustered_personalisation": {"global_rounds": 1}, "contribution": {"estimator": "reconstruct"}}
    strategy = build_strategy(name, {"base": "fedavg", **more.get(name, {})})
    assert isinstance(strategy, Wrapper)
    with pytest.raises(PrivacyError, match="client_central goes with fedavg"):
        strategy.largest_weight(4)


def test_every_strategy_that_takes_another_is_a_wrapper() -> None:
    for target in STRATEGIES.values():
        module, _, name = target.partition(":")
        strategy = getattr(importlib.import_module(module), name)
        takes = "base" in inspect.signature(strategy).parameters
        assert not takes or issubclass(strategy, Wrapper), name


def test_a_subclass_of_fedavg_has_no_bound_of_its_own_kind() -> None:
    class Own(FedAvg):
        pass

    with pytest.raises(PrivacyError, match="does not bound"):
        Own().largest_weight(4)


# rules that hold over all code

FILES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not name.startswith(("tests/", "examples/", "docs/")) and (ROOT / name).exists()
] or [
    path for path in ROOT.glob("[a-z]*/**/*.py") if path.relative_to(ROOT).parts[0] not in ("tests", ".venv")
]


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def root_of(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def test_no_code_reaches_into_private_fields_of_another_object() -> None:
    found = []
    for name, tree in trees():
        imported = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr[1] == "_":
                continue
            root = root_of(node.value)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            # a name of an imported module (os._exit) belongs to somebody who offers nothing else
            module = isinstance(root, ast.Name) and root.id in imported
            if not own and not module and not is_super(node.value):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_object_is_told_by_its_identity() -> None:
    """`id(...)` as a key, or `is` between two objects; None, True, types and members of enums are no such."""
    found = []
    types = {"int", "str", "float", "bool", "list", "dict"}

    def named(node: ast.expr) -> bool:
        match node:
            case ast.Constant():
                return True
            case (
                ast.Call(func=ast.Name(id="type")) | ast.Call(func=ast.Attribute(value=ast.Name("threading")))
            ):
                return True
            case ast.Attribute(value=ast.Attribute(value=ast.Name("inspect"))):
                return True
            case ast.Name(id=name):
                return name in types or name[0].isupper()
            case ast.Attribute(attr=name):
                return name[0].isupper()
        return False

    for name, tree in trees():
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
            compared = isinstance(node, ast.Compare) and any(
                isinstance(operation, ast.Is | ast.IsNot) and not named(left) and not named(right)
                for operation, left, right in zip(
                    node.ops, [node.left, *node.comparators], node.comparators, strict=False
                )
            )
            if called or compared:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def concrete_strategies() -> set[str]:
    classes: set[type] = set()
    for target in STRATEGIES.values():
        module, _, attribute = target.partition(":")
        classes |= {*getattr(importlib.import_module(module), attribute).__mro__}
    return {kind.__name__ for kind in classes - {*IncrementalStrategy.__mro__}}


def test_nothing_is_decided_by_the_class_of_a_strategy() -> None:
    strategies = concrete_strategies()
    assert {"SerialRing", "FedAvg", "Wrapper"} <= strategies
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                tested = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
            elif isinstance(node, ast.Compare) and any(isinstance(o, ast.Is | ast.IsNot) for o in node.ops):
                tested = node.comparators
            else:
                continue
            names = {part.id for test in tested for part in ast.walk(test) if isinstance(part, ast.Name)}
            if names & strategies:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_the_rules_look_at_the_base_of_strategies() -> None:
    assert base_module.__file__ is not None
    assert "perennial/strategies/base.py" in {name for name, _ in trees()}
