"""A strategy around another one hands on every hook that it does not change, and code keeps its distance."""

import ast
import importlib
import inspect
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from perennial.config.bounds import BoundsConfig
from perennial.config.sums import SumsConfig
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.strategies import base as base_module
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import STRATEGIES, build_strategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.robust_rule import RobustRule
from perennial.strategies.round.disclosures import Disclosures
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.part import RoundPart
from perennial.strategies.wrapper import Wrapper

ROOT = Path(__file__).parents[2]
OF_THE_ROUND = {
    "begin_round_of": "hands a round to an inner strategy",
    "begin_part": "ends in begin_round",
    "require_flowers_round": "asks a wrapper for itself; `needs` is the base's where it has none",
    "sum_grid": "follows from the bounds that a part of a round brings",
}
"""Methods of the base that no method changes: they are how hooks are called."""
HOOKS = sorted(
    name
    for name, value in vars(IncrementalStrategy).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in OF_THE_ROUND
)
FACTS = (
    "staleness",
    "waits_for_busy_sites",
    "takes_parts",
    "serves_groups",
    "combines_replies",
    "compares_updates",
    "stands_in",
    "turns",
)


class Noted(FedAvg):
    """Notes which of its hooks are called, and answers each with something of its own."""

    staleness, waits_for_busy_sites, serves_groups = 7, False, False
    combines_replies, stands_in, takes_parts = False, True, False
    compares_updates = True

    def __init__(self) -> None:
        super().__init__(max_update_norm=3.0)
        self.called: list[str] = []
        self.answers: dict[str, Any] = {
            "requests": {"a": object()},
            "close_round": 3,
            "finish_round": {},
            "take_sum": {"sum": 4},
            "largest_weight": 0.125,
            "disclosures": Disclosures(clear_uploads=("steps",)),
            "summary_blocks": {"own": 1},
            "group_models": {"0": {}},
            "state_dict": {"own": 2},
            "train_round": RoundOutcome(),
            "configure_train": [],
            "aggregate_train": (None, None),
            "weight": 5.0,
        }

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)

        def hook(*_: Any, **__: Any) -> Any:
            self.called.append(name)
            return self.answers.get(name)

        return hook

    @property
    def turns(self) -> Any:
        return self


def test_there_are_hooks_to_forward() -> None:
    assert {"attach", "begin_task", "largest_weight", "disclosures", "while_waiting", "state_dict"} <= {
        *HOOKS
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_a_wrapper_hands_on_each_hook(hook: str) -> None:
    inner = Noted()
    wrapper = Wrapper(inner)
    count = len(inspect.signature(getattr(IncrementalStrategy, hook)).parameters) - 1
    arguments: list[Any] = [cast(Any, None)] * count
    if hook == "serve_group":
        arguments[0] = Wrapper(Noted())
    if hook == "load_state_dict":
        arguments[0] = {"base/own": 2}
    result = getattr(wrapper, hook)(*arguments)
    assert hook in inner.called
    expected = inner.answers.get(hook)
    assert result == ({"base/own": 2} if hook == "state_dict" else expected)


@pytest.mark.parametrize("fact", FACTS)
def test_a_wrapper_is_what_its_base_is(fact: str) -> None:
    inner = Noted()
    assert getattr(Wrapper(inner), fact) == getattr(inner, fact)


def test_facts_of_the_base_are_all_held() -> None:
    facts = {name for name, value in vars(IncrementalStrategy).items() if isinstance(value, bool | int)}
    plain = facts - {"__firstlineno__"}  # which Python 3.13 adds
    assert plain | {"turns"} == {*FACTS}


def test_a_part_of_a_round_reaches_the_innermost_strategy() -> None:
    inner = FedAvg()
    outer = Wrapper(Wrapper(inner))
    outer.members = frozenset("ab")
    outcome = RoundOutcome()
    outer.begin_part(RoundPart({}, outcome, 4, 9, None, {1: "a"}, 2.0, BoundsConfig(), SumsConfig()))
    assert (inner.outcome, inner.asked, inner.max_update_norm) == (outcome, 4, 2.0)
    assert inner.members == frozenset("ab")
    assert outer.largest_weight() == 0.25


def test_what_watches_a_wrapper_watches_its_base() -> None:
    wrapper = Wrapper(inner := FedAvg())
    wrapper.watchers.append(lambda reply, reference, sweep: {})
    assert inner.watchers == wrapper.watchers


def test_a_wrapper_under_flowers_own_start_is_its_base() -> None:
    wrapper = Wrapper(inner := Noted())
    assert list(wrapper.configure_train(1, ArrayRecord(), ConfigRecord(), cast(Any, None))) == []
    assert inner.called == ["configure_train"]


@pytest.mark.parametrize(
    "name", ["digest_synthesis", "clustered_personalisation", "contribution", "class_weighted_head"]
)
def test_what_releases_more_than_the_noised_model_has_no_bound(name: str) -> None:
    more = {"clustered_personalisation": {"global_rounds": 1}, "contribution": {"estimator": "reconstruct"}}
    strategy = build_strategy(name, {"base": "fedavg", **more.get(name, {})})
    assert isinstance(strategy, Wrapper)
    strategy.asked = 4
    with pytest.raises(PrivacyError, match="client_central goes with fedavg"):
        strategy.largest_weight()


def test_every_strategy_that_takes_another_is_a_wrapper() -> None:
    """But for a robust rule around another one, whose base makes no round and combines rows alone."""
    for target in STRATEGIES.values():
        module, _, name = target.partition(":")
        strategy = getattr(importlib.import_module(module), name)
        takes = "base" in inspect.signature(strategy).parameters
        assert not takes or issubclass(strategy, Wrapper | RobustRule), name


def test_a_rule_around_another_one_combines_with_nothing_but_rules() -> None:
    assert (
        build_strategy("bucketing", {"base": {"name": "median", "max_update_norm": 2.0}}).max_update_norm == 2
    )
    inside = {"bucketing": {"base": "median"}, "contribution": {"base": "median", "estimator": "reconstruct"}}
    for base in ({"name": "fedavg"}, *({"name": name, **keys} for name, keys in inside.items())):
        with pytest.raises(ConfigError, match="base: found .*; allowed median, trimmed_mean, krum"):
            build_strategy("bucketing", {"base": base})


def test_a_subclass_of_fedavg_has_no_bound_of_its_own_kind() -> None:
    class Own(FedAvg):
        pass

    with pytest.raises(PrivacyError, match="does not bound"):
        Own().largest_weight()


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
    assert "strategies/base.py" in {name for name, _ in trees()}
