"""The yardstick of secure_cost: Flower's SecAgg+, run by its own workflow and its own mod.

Nothing of it is replaced: SecAggPlusWorkflow is the server and secaggplus_mod each site, with Flower's
default quantisation (values clipped to 8, 2^22 levels, modulus 2^32). Every site has the largest weight that
the workflow allows, which costs its quantisation the least. What trains is a function that returns the
site's array, and Flower's strategy takes the opened mean as it is, so both cost nothing.
"""

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from perennial.deploy.flower_seam import (
    LegacyContext,
    SecAggPlusWorkflow,
    legacy_types,
    recorddict_compat,
    recorddict_from_proto,
    recorddict_to_proto,
    secaggplus_mod,
)
from perennial.engine.grid import set_task_identity

MAX_WEIGHT = 1000
"""SecAggPlusWorkflow's default."""
ROUND: Any = {"current_round": 1}
Vector = NDArray[np.float32]


class _Strategy:
    """What SecAggPlusWorkflow asks of a strategy; keeps the opened mean."""

    def __init__(self, sites: int, shape: tuple[int, ...]) -> None:
        self._sites, self._shape = sites, shape
        self.mean: Any = None

    def configure_fit(self, number: int, parameters: Any, manager: Any) -> list[tuple[Any, Any]]:
        nothing = legacy_types.ndarrays_to_parameters([np.zeros(0, dtype=np.float32)])
        order = legacy_types.FitIns(nothing, {})
        return [(SimpleNamespace(node_id=1 + site), order) for site in range(self._sites)]

    def aggregate_fit(
        self, number: int, results: list[Any], failures: list[Any]
    ) -> tuple[None, dict[str, Any]]:
        assert len(results) == self._sites and not failures
        self.mean = legacy_types.parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


class _Sites:
    """A Grid whose sites are secaggplus_mod around their arrays; adds up what each phase costs them."""

    def __init__(self, sites: int, update_of: Callable[[int], Vector]) -> None:
        self._update_of = update_of
        self._contexts = {1 + site: Context(1, 1 + site, {}, RecordDict(), {}) for site in range(sites)}
        self.seconds = self.elsewhere = 0.0
        """Of the sites; and of the sites and of what stands for the transport."""
        self.bytes_up = self.bytes_down = 0

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        start = time.process_time()
        replies = [self._answer(message) for message in messages]
        self.elsewhere += time.process_time() - start
        return replies

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        # one content object may serve all sites, and each site changes its own
        content = recorddict_to_proto(message.content)
        self.bytes_down += content.ByteSize()
        message.content = recorddict_from_proto(content)
        update = legacy_types.ndarrays_to_parameters([self._update_of(node - 1)])

        def trained(request: Message, context: Context) -> Message:
            done = legacy_types.Status(legacy_types.Code.OK, "")
            result = legacy_types.FitRes(done, update, MAX_WEIGHT, {})
            return Message(recorddict_compat.fitres_to_recorddict(result, keep_input=True), reply_to=request)

        start = time.process_time()
        reply = secaggplus_mod(message, self._contexts[node], trained)
        self.seconds += time.process_time() - start
        self.bytes_up += recorddict_to_proto(reply.content).ByteSize()
        reply.metadata.__dict__["_src_node_id"] = node  # as a SuperLink notes it
        return reply


def secagg_plus(sites: int, update_of: Callable[[int], Vector], exact: NDArray[np.float64]) -> dict[str, Any]:
    """Time, bytes and error of one sum, with shares for all sites and a threshold of a majority.

    update_of: the float32 array of a site. exact: the mean without any quantisation.
    """
    set_task_identity()
    grid, strategy = _Sites(sites, update_of), _Strategy(sites, exact.shape)
    state = RecordDict({"config": ConfigRecord(ROUND)})
    nothing = legacy_types.ndarrays_to_parameters([np.zeros(0, dtype=np.float32)])
    state.array_records["parameters"] = recorddict_compat.parameters_to_arrayrecord(nothing, True)
    context: Any = LegacyContext(Context(1, 0, {}, state, {}), strategy=strategy)  # pyright: ignore[reportArgumentType]
    workflow = SecAggPlusWorkflow(sites, sites // 2 + 1, max_weight=float(MAX_WEIGHT))
    start = time.process_time()
    workflow(grid, context)  # pyright: ignore[reportArgumentType]
    whole = time.process_time() - start
    return {
        "site_seconds": grid.seconds / sites,
        "server_seconds": whole - grid.elsewhere,
        "site_bytes": (grid.bytes_up + grid.bytes_down) / sites,
        "largest_error_of_the_mean": float(np.abs(strategy.mean - exact).max()),
    }
