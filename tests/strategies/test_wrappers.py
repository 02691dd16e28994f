"""A strategy around another one hands on every hook that it does not change, and code keeps its distance."""

from typing import Any, cast

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from perennial.config.strategies import Asks
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.strategies.base import Wrapper
from perennial.strategies.factory import build_strategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Disclosures, Traits


class Noted(FedAvg):
    """Notes which hooks of a run reach it, and answers with something of its own."""

    traits = Traits(staleness=7, runs_per_cluster=False, requires="what nobody has")
    asks = Asks(clear_uploads=("steps",))

    def __init__(self) -> None:
        super().__init__()
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
    assert outer.traits == inner.traits
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


def test_what_a_method_requires_is_refused_under_flowers_own_start() -> None:
    for strategy in (Noted(), Wrapper(Noted())):
        with pytest.raises(ConfigError, match="needs what nobody has"):
            strategy.configure_train(1, ArrayRecord(), ConfigRecord(), cast(Any, None))


@pytest.mark.parametrize("name", ["digest_synthesis", "clustered_personalisation"])
def test_what_releases_more_than_the_noised_model_has_no_bound(name: str) -> None:
    more = {"clustered_personalisation": {"global_rounds": 1}}
    strategy = build_strategy(name, {"base": "fedavg", **more.get(name, {})})
    assert isinstance(strategy, Wrapper)
    with pytest.raises(PrivacyError, match="client_central goes with fedavg"):
        strategy.largest_weight(4)


def test_a_subclass_of_fedavg_has_no_bound_of_its_own_kind() -> None:
    class Own(FedAvg):
        pass

    with pytest.raises(PrivacyError, match="does not bound"):
        Own().largest_weight(4)
